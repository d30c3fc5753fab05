"""Byte-level tokenizer, small enough to build in each test run."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer() -> Any:
    """Returns a tokenizer with one token per byte, and <eos>, <pad>, <tool>; it splits non-ASCII characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<pad>", special=True)])
    built.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<eos>", chat_template=TEMPLATE)
