"""Small tokenizers with different vocabularies, trained in a few milliseconds."""

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CONTROLS = ("<bos>", "<eos>", "<mark>")
CORPUS = (
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on; then they quickly run there",
    "def add(a, b):\n\treturn a + b\n\n\ndef subtract(a, b):\n\treturn a - b\n",
    "naïve café, größer, 東京都, 日本語の文字, 🙂🙃👩‍💻, e\u0301 and a\u0308",
)


def byte_level(merges: int = 60, *, by_words: bool = True, controls: tuple[str, ...] = CONTROLS) -> Any:
    """Returns a byte-level BPE tokenizer, as of GPT-2; `by_words`: no token crosses the start of a word."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(CORPUS, _trainer(len(alphabet) + merges, initial_alphabet=sorted(alphabet)))
    return _with_controls(built, controls)


def sentence_piece(merges: int = 60, *, prepends: bool = False, begins: bool = False) -> Any:
    """Returns a BPE tokenizer over characters with byte tokens for rare ones, as of Gemma, or of Llama 2 if it
    `prepends` a space. `begins`: <bos> begins all texts.
    """
    marked = [text.replace(" ", "▁") for text in CORPUS]
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator(marked, _trainer(80 + merges, limit_alphabet=60))
    tokens = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokens |= {token: 256 + index for index, token in enumerate(sorted(trained.get_vocab(), key=trained.token_to_id))}
    pairs = _pairs(trained)
    built = Tokenizer(models.BPE(tokens, pairs, byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepends else replace
    strip = [decoders.Strip(content=" ", left=1)] if prepends else []
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    tokenizer = _with_controls(built)
    if begins:
        bos = ("<bos>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[bos])
    return tokenizer


def _trainer(size: int, **options: Any) -> Any:
    return trainers.BpeTrainer(vocab_size=size, show_progress=False, min_frequency=1, **options)


def _pairs(trained: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]


def _with_controls(built: Tokenizer, controls: tuple[str, ...] = CONTROLS) -> Any:
    built.add_special_tokens([AddedToken(name, special=True) for name in controls])
    return PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<bos>", eos_token="<eos>")
