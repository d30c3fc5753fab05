"""Tests how a draft model's tokens become tokens of a target."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from actors.drafters.model.draft_model import DraftModel
from actors.drafters.registry import DraftSetup, OtherTarget, check_shared_vocabulary, create_method
from actors.drafters.translation.pairing import Pairing, describe, draft_pairing
from actors.grammars import GrammarCompiler, load_grammar_vocabulary
from actors.models.checkpoint import load_tokenizer, vocabulary
from cluster.config import DraftPool, ModelConfig, Resources
from cluster.drafting.method import DraftingMethod
from cluster.errors import ModelError
from protos.messages import DraftRequest, Open
from tests.toy_tokenizers import byte_level, sentence_piece
from tools.drafts.evaluation import MeasuredTarget


def a_model(folder: Path, tokenizer: Any = None, rows: int | None = None) -> Path:
    torch.manual_seed(0)
    size = rows or max(tokenizer.get_vocab().values()) + 1
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=size, **sizes)).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def word_level(words: str) -> Any:
    built = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words.split())}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=built)


def pair(target: Path, draft: Path, **options: str) -> Pairing:
    return draft_pairing(DraftPool(model=str(draft), **options), vocabulary(target))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_model(tmp_path_factory.mktemp("target"), sentence_piece(60))


def test_one_tokenizer_needs_no_translation(target: Path, tmp_path: Path) -> None:
    draft = a_model(tmp_path, sentence_piece(60))
    assert not pair(target, draft).is_translated
    assert describe(pair(target, draft), target) == "same vocabulary"


@pytest.mark.parametrize("rows", [151_936, 152_064])
def test_embeddings_may_be_padded(target: Path, tmp_path: Path, rows: int) -> None:
    draft = a_model(tmp_path, sentence_piece(60), rows=rows)
    assert not pair(target, draft).is_translated
    assert f"and {rows} rows" in describe(pair(target, draft), target)


@torch.inference_mode()
def test_a_padded_draft_proposes_only_tokens(tmp_path: Path) -> None:
    """Sizes of Qwen2.5 0.5B and 72B, which share a tokenizer."""
    tokenizer = sentence_piece(60)
    target = a_model(tmp_path / "target", tokenizer, rows=152_064)
    draft = DraftPool(model=str(a_model(tmp_path / "draft", tokenizer, rows=151_936)))
    measured = MeasuredTarget(ModelConfig(target=str(target), dtype="float32"), Resources(), context=64)
    method = create_method(draft, measured.setup(draft, 4))
    prompt = tuple(tokenizer("the quick brown fox")["input_ids"])
    method.open(Open.measured("s", prompt, 64, 4))
    (proposal,) = method.draft([DraftRequest("s", 1, len(prompt), 0, 4)])
    assert len(proposal.tokens) == 4
    assert max(proposal.tokens) < len(tokenizer)
    method.close(["s"])
    generation = measured.generation(0, prompt, 16, 0.0, 4)
    drafted = [token for emit in measured.run(generation, method, trees=True) for token in emit.tokens]
    assert drafted == list(measured.decode(generation).tokens[len(prompt) :])


def test_a_padded_draft_follows_a_grammar(tmp_path: Path) -> None:
    """The sizes of Qwen2.5 0.5B: 271 rows of its embedding have no token."""
    tokenizer = sentence_piece(60)
    folder = a_model(tmp_path, tokenizer, rows=len(tokenizer) + 271)
    grammars = GrammarCompiler(load_grammar_vocabulary(folder))
    masking = (grammars.draft_masking,)
    setup = DraftSetup("float32", 64, 4, vocabulary(folder), str(folder), processor_factories=masking)
    method = create_method(DraftPool(model=str(folder)), setup)
    prompt = tuple(tokenizer("the quick brown fox")["input_ids"])
    method.open(replace(Open.measured("s", prompt, 64, 4), grammar=LLMatcher.grammar_from_regex("(dog)+")))
    (proposal,) = method.draft([DraftRequest("s", 1, len(prompt), 0, 4)])
    assert "dogdogdogdog".startswith(tokenizer.decode(proposal.tokens))
    assert proposal.tokens


def test_another_tokenizer_is_translated(target: Path, tmp_path: Path) -> None:
    draft = a_model(tmp_path, byte_level(80))
    assert pair(target, draft).is_translated
    assert "translated through text" in describe(pair(target, draft), target)


def test_a_draft_without_a_row_for_each_of_the_targets_tokens_is_translated(target: Path, tmp_path: Path) -> None:
    """The draft reads the target's tokens, and a token beyond its embedding would end the drafter during a stream."""
    draft = a_model(tmp_path, sentence_piece(60), rows=300)
    tokens = vocabulary(target)
    assert pair(target, draft).is_translated
    assert max(pair(target, draft).draft_tokens(tokens)) < 300
    prompt = tuple(load_tokenizer(target)("the quick brown fox")["input_ids"])
    assert max(prompt) >= 300
    method = method_for(DraftPool(model=str(draft)), target, target)
    method.open(Open.measured("s", prompt, 64, 4))
    with torch.inference_mode():
        (proposal,) = method.draft([DraftRequest("s", 1, len(prompt), 0, 4)])
    assert proposal.base_len == len(prompt)


def test_a_draft_without_a_tokenizer_is_taken_for_the_targets(target: Path, tmp_path: Path) -> None:
    assert not pair(target, a_model(tmp_path, rows=2000)).is_translated


def test_a_tokenizer_elsewhere_can_be_named(target: Path, tmp_path: Path) -> None:
    draft = a_model(tmp_path / "draft", rows=360)
    byte_level(80).save_pretrained(tmp_path / "tokenizer")
    assert pair(target, draft, tokenizer=str(tmp_path / "tokenizer")).is_translated


def test_a_small_draft_without_a_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"300 vocabulary rows.*set draft\.tokenizer"):
        pair(target, a_model(tmp_path, rows=300))


def test_a_tokenizer_without_text_is_refused(target: Path, tmp_path: Path) -> None:
    draft = a_model(tmp_path, word_level("a b c"))
    with pytest.raises(ModelError, match="cannot be translated"):
        describe(pair(target, draft), target)


def method_for(draft: DraftPool, first: Path, second: Path) -> DraftingMethod:
    """Creates the method for models "" and "second"."""
    others = {"second": OtherTarget(str(second), vocabulary(second))}
    return create_method(draft, DraftSetup("float32", 64, 4, vocabulary(first), str(first), others=others))


@torch.inference_mode()
def test_one_method_drafts_for_targets_with_other_tokenizers(target: Path, tmp_path: Path) -> None:
    """Each session's block consists of tokens of its own target."""
    second = a_model(tmp_path / "second", byte_level())
    method = method_for(DraftPool(model=str(a_model(tmp_path / "draft", sentence_piece(40)))), target, second)
    for model, folder in (("", target), ("second", second)):
        tokenizer = load_tokenizer(folder)
        prompt = tuple(tokenizer("the quick brown fox and")["input_ids"])
        method.open(replace(Open.measured(f"s{model}", prompt, 64, 4), model=model))
        (proposal,) = method.draft([DraftRequest(f"s{model}", 1, len(prompt), 0, 4)])
        assert proposal.tokens
        assert max(proposal.tokens) < len(tokenizer)


def test_targets_with_the_drafts_tokenizer_need_no_translation(target: Path, tmp_path: Path) -> None:
    draft = a_model(tmp_path, sentence_piece(60), rows=999)
    assert isinstance(method_for(DraftPool(model=str(draft)), target, target), DraftModel)


def test_targets_that_cannot_share_a_draft_are_refused(target: Path, tmp_path: Path) -> None:
    second = a_model(tmp_path / "second", byte_level())
    draft = a_model(tmp_path / "draft", rows=999)
    with pytest.raises(ModelError, match=r"has no tokenizer, but its targets have different vocabularies"):
        method_for(DraftPool(model=str(draft)), target, second)
    check_shared_vocabulary(DraftPool(method="ngram"), {"a": "1", "b": "2"})
    with pytest.raises(ModelError, match="the vocabularies of a and b differ, but method suffix"):
        check_shared_vocabulary(DraftPool(method="suffix"), {"a": "1", "b": "2"})
