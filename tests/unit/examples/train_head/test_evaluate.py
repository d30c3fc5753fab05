"""Tests measurements of a draft with real schedulers and tiny models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.models.checkpoint import load_model
from cluster.config import DraftPool
from examples.train_head.evaluate import Pair
from examples.train_head.options import HeadKind
from examples.train_head.trainer import LATEST
from tests.byte_tokenizer import byte_tokenizer
from tests.unit.actors.tiny_models import SIZES, jittered
from tests.unit.examples.train_head.tiny_training import CPU, a_training, an_option, stored

ROWS = 259  # the tokenizer's vocabulary
PROMPTS = ((72, 101, 108), (87, 111, 114, 108, 100))
BLOCK_LEN = 3
TOKENS = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a target with a tokenizer. With this seed, no answer contains the end-of-text token."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(**SIZES | {"vocab_size": ROWS}, eos_token_id=None)
    jittered(LlamaForCausalLM(config)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def a_pair(target: Path, method: str, draft: Path) -> Pair:
    options: Any = {"method": method, "model": str(draft)}
    return Pair(target, load_model(target, "float32", CPU), DraftPool(**options), "float32")


def test_the_target_as_its_own_draft_is_always_accepted(target):
    found = a_pair(target, "draft_model", target).run(PROMPTS, BLOCK_LEN, TOKENS)
    assert found.first_right == 1.0
    assert found.tokens_a_verify == BLOCK_LEN + 1
    assert found.block_ms > 0


def test_a_head_drafts_and_the_text_is_the_targets(target, tmp_path):
    shards = stored(tmp_path / "states", target=target, layers=(1, 2))
    training = a_training(tmp_path / "head", shards, an_option(HeadKind.EAGLE), steps=4, target=target)
    training.run()
    pair = a_pair(target, "eagle", tmp_path / "head" / LATEST)
    found = pair.run(PROMPTS, BLOCK_LEN, TOKENS)
    assert 1.0 <= found.tokens_a_verify < BLOCK_LEN + 1
    assert found.answers == [plain(target, prompt) for prompt in PROMPTS]


def plain(target: Path, prompt: tuple[int, ...]) -> list[int]:
    model = load_model(target, "float32", CPU)
    found = list(prompt)
    for _ in range(TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([found])).logits[0, -1]
        found.append(int(logits.argmax()))
    return found[len(prompt) :]
