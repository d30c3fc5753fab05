"""Serves tiny random models with unrelated tokenizers over Ray, gRPC and HTTP: the text is the target's own."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from openai.types import Completion
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.config import validated
from serve_app.operations.local import serving
from tests.integration.serving import greedy_texts
from tests.toy_tokenizers import byte_level, sentence_piece

PROMPTS = ("the quick brown fox", "def add(a, b):\n\treturn", "東京都 🙂", "e\u0301 and <mark> x", "123 z", "y; w")
TOKENS = 24


def save_model(folder: Path, tokenizer: Any, seed: int) -> Path:
    """Saves a random model that mostly repeats its last token, so that any two such models agree."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    size = max(tokenizer.get_vocab().values()) + 1
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(vocab_size=size, tie_word_embeddings=True, initializer_range=0.02, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), byte_level(100), 0)


@pytest.fixture(scope="module")
def client(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    draft = save_model(tmp_path_factory.mktemp("draft"), sentence_piece(60), 1)
    cpus = {"num_cpus": 0.3}
    config = validated(
        {
            "model": {"target": str(target), "served_name": "toy", "dtype": "float32", "max_context": 256},
            "target": {"resources_per_rank": cpus},
            "draft": {"model": str(draft), "resources": cpus},
            "speculation": {"draft_tokens": 4, "schedule": "lock_step"},
            "server": {"port": 0},
        }
    )
    with serving(config, Console(quiet=True)) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def complete(client: OpenAI, prompt: str, draft_tokens: int, **options: Any) -> Completion:
    body = {"speculation": {"draft_tokens": draft_tokens}, "ignore_eos": True}
    return client.completions.create(model="toy", prompt=prompt, max_tokens=TOKENS, extra_body=body, **options)


def accepted(answer: Completion) -> int:
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    return answer.usage.completion_tokens_details.accepted_prediction_tokens or 0


def test_greedy_text_equals_generate(client: OpenAI, target: Path) -> None:
    total = 0
    for prompt, text in greedy_texts(str(target), PROMPTS, TOKENS).items():
        answer = complete(client, prompt, 4, temperature=0)
        assert answer.choices[0].text == text
        total += accepted(answer)
    assert total > 0


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_seeds_text_does_not_depend_on_drafts(client: OpenAI, temperature: float) -> None:
    for seed, prompt in enumerate(PROMPTS):
        drafted, alone = [
            complete(client, prompt, tokens, temperature=temperature, seed=seed).choices[0].text for tokens in (4, 0)
        ]
        assert drafted == alone


def test_stop_strings_end_the_same_text(client: OpenAI) -> None:
    for prompt in PROMPTS:
        whole = complete(client, prompt, 0, temperature=0).choices[0].text
        stop = whole[len(whole) // 2 :][:2]
        answers = [complete(client, prompt, tokens, temperature=0, stop=[stop]).choices[0].text for tokens in (4, 0)]
        assert answers[0] == answers[1] == whole[: whole.index(stop)]


def test_rejection_sampling_is_refused_by_name(client: OpenAI) -> None:
    body = {"speculation": {"acceptance": "rejection"}}
    with pytest.raises(openai.BadRequestError, match=r"speculation\.acceptance is rejection, .* another tokenizer"):
        client.completions.create(model="toy", prompt="the", max_tokens=4, extra_body=body)
