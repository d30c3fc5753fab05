"""Serves tiny random models with unrelated tokenizers over Ray, gRPC and HTTP: the text is the target's own."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.config import validated
from serve_app.operations.local import serving
from tests.byte_tokenizer import TEMPLATE
from tests.integration.serving import Served, greedy_texts
from tests.toy_tokenizers import byte_level, sentence_piece

DRAFT_TEMPLATE = "{{ bos_token }}{% for m in messages %}<mark>{{ m.role }} {{ m.content }}{% endfor %}<mark>answer "
PROMPTS = ("the quick brown fox", "def add(a, b):\n\treturn", "東京都 🙂", "e\u0301 and <mark> x", "123 z", "y; w")
TOKENS = 24
FREE: Mapping[str, Any] = MappingProxyType({"ignore_eos": True})


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


def with_template(tokenizer: Any, template: str) -> Any:
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), with_template(byte_level(100), TEMPLATE), 0)


@pytest.fixture(scope="module")
def served(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serves the target with a draft that has a chat template of its own."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    draft = save_model(tmp_path_factory.mktemp("draft"), with_template(sentence_piece(60), DRAFT_TEMPLATE), 1)
    cpus = {"num_cpus": 0.3}
    config = validated(
        {
            "model": {"target": str(target), "served_name": "toy", "dtype": "float32", "max_context": 256},
            "target": {"resources_per_rank": cpus},
            "draft": {"model": str(draft), "prompt": "template", "resources": cpus},
            "speculation": {"draft_tokens": 4, "schedule": "lock_step"},
            "server": {"port": 0},
        }
    )
    with serving(config, Console(quiet=True)) as url:
        yield Served(url, config)


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return served.client


def complete(
    client: OpenAI, prompt: str, draft_tokens: int, rules: Mapping[str, Any] = FREE, **options: Any
) -> Completion:
    body = {"speculation": {"draft_tokens": draft_tokens}, **rules}
    return client.completions.create(model="toy", prompt=prompt, max_tokens=TOKENS, extra_body=body, **options)


def accepted(answer: Completion | ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    return answer.usage.completion_tokens_details.accepted_prediction_tokens or 0


def rejected(answer: Completion) -> int:
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    return answer.usage.completion_tokens_details.rejected_prediction_tokens or 0


def test_greedy_text_equals_generate(client: OpenAI, target: Path) -> None:
    """Repeats the requests until a block arrives in time, since all may be late on a busy machine."""
    texts = greedy_texts(str(target), PROMPTS, TOKENS)

    def accepted_tokens() -> int:
        total = 0
        for prompt, text in texts.items():
            answer = complete(client, prompt, 4, temperature=0)
            assert answer.choices[0].text == text
            total += accepted(answer)
        return total

    assert any(accepted_tokens() for _ in range(20))


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


def drafts_from_own_prompts(served: Served) -> int:
    """Returns the number of sessions for which the drafter received a prompt in the draft's template."""
    return sum(drafter["counts"].get("draft_prompts", 0) for drafter in served.inspect("Drafter"))


def chat(client: OpenAI, content: str, draft_tokens: int, **options: Any) -> ChatCompletion:
    body = {"speculation": {"draft_tokens": draft_tokens}, **FREE}
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(
        model="toy", messages=messages, max_tokens=TOKENS, extra_body=body, temperature=0, **options
    )


def repeat_until(drafted: Callable[[], int]) -> None:
    """Repeats requests until one has drafts, because on a busy machine blocks may be late for such small targets."""
    assert any(drafted() for _ in range(20))


def test_chats_drafted_from_the_drafts_template_have_the_same_text(served: Served) -> None:
    before = drafts_from_own_prompts(served)

    def accepted_by_chats() -> int:
        total = 0
        for prompt in PROMPTS:
            drafted, alone = [chat(served.client, prompt, tokens) for tokens in (4, 0)]
            assert drafted.choices[0].message.content == alone.choices[0].message.content
            total += accepted(drafted)
        return total

    repeat_until(accepted_by_chats)
    chats = drafts_from_own_prompts(served) - before
    assert chats >= len(PROMPTS)
    complete(served.client, PROMPTS[0], 4, temperature=0)
    assert drafts_from_own_prompts(served) == before + chats, "completions have no conversation"


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ages": {"type": "array", "items": {"enum": [1, 20]}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
RULES: dict[str, dict[str, Any]] = {
    "a JSON schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "logit biases": {"logit_bias": {str(token): (-1) ** token * 5 for token in range(260, 300)}, **FREE},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_grammars_and_biases_hold_for_drafts_that_ignore_them(
    client: OpenAI, rules: dict[str, Any], temperature: float
) -> None:
    ask = partial(complete, client, temperature=temperature, seed=7)
    free = [ask(prompt, 0).choices[0].text for prompt in PROMPTS]

    def drafts() -> int:
        total = 0
        texts = []
        for prompt in PROMPTS:
            drafted, alone = [ask(prompt, tokens, rules) for tokens in (4, 0)]
            assert drafted.choices[0].text == alone.choices[0].text
            texts.append(alone.choices[0].text)
            total += accepted(drafted) + rejected(drafted)
        assert texts != free, "the rules have an effect"
        return total

    repeat_until(drafts)


def test_rejection_sampling_is_refused_by_name(client: OpenAI) -> None:
    body = {"speculation": {"acceptance": "rejection"}}
    with pytest.raises(openai.BadRequestError, match=r"speculation\.acceptance is rejection, .* another tokenizer"):
        client.completions.create(model="toy", prompt="the", max_tokens=4, extra_body=body)
