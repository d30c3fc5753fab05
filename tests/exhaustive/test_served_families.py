"""A mixture of experts and a hybrid over HTTP, each split over two ranks, with lookup drafts and a killed target.

The greedy texts are those of `generate` in float32, also for streams whose target dies.
Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from serve_app.cli.demo import demo_config
from tests.exhaustive.small_target import SPREAD, copy_tokenizer
from tests.integration.serving import Reference, Served, demo_served
from tests.integration.test_serving import assert_nothing_left, eventually

TOKENS = 96
PROMPTS = [
    "List the numbers from one to fifty, in words.",
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
    "Write a table of five rivers and their lengths.",
    "Explain to a child why the sky is blue.",
]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_moe": SIZES, "qwen3_next": SIZES | LINEAR}


def make_target(kind: str, folder: Path) -> str:
    """Writes a random model with the demo's tokenizer; returns its path."""
    demo = Path(demo_config([]).model.target)
    same = AutoConfig.from_pretrained(demo)
    ids = {name: getattr(same, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **FAMILIES[kind], **ids), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=SPREAD)
    added = AutoTokenizer.from_pretrained(demo).added_tokens_decoder
    # Special tokens are never drawn, because the reference's texts omit them.
    model.lm_head.weight.data[[token for token, of in added.items() if of.special]] = 0.0
    model.save_pretrained(folder)
    copy_tokenizer(demo, folder)
    return str(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with demo_served(
        f"model.target={make_target(request.param, tmp_path_factory.mktemp('target'))}",
        "model.max_context=512",
        "target.tensor_parallel=2",
        "target.replicas={min: 2, max: 2}",
        "draft={method: ngram}",
    ) as served:
        yield served
        assert_nothing_left(served)


async def stream_all(served: Served, kill: int | None = None) -> list[str]:
    """Streams all answers concurrently; kills a process once all have begun."""
    begun = asyncio.Semaphore(0)

    async def one(prompt: str) -> str:
        text = ""
        has_begun = False
        async for chunk in await client.chat.completions.create(
            model=served.config.served_names[0],
            messages=[{"role": "user", "content": prompt}],
            max_tokens=TOKENS,
            temperature=0.0,
            stream=True,
        ):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if text and not has_begun:
                has_begun = True
                begun.release()
        return text

    async def disturb() -> None:
        for _ in PROMPTS:
            await begun.acquire()
        if kill is not None:
            os.kill(kill, signal.SIGKILL)

    async with served.async_client as client:
        *texts, _ = await asyncio.gather(*(one(prompt) for prompt in PROMPTS), disturb())
    return [str(text) for text in texts]


async def test_texts_equal_generate_even_if_a_target_dies(served: Served) -> None:
    reference = Reference(served.config.model.target)
    texts = await stream_all(served)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        reference.assert_greedy(prompt, TOKENS, text)
    before = await asyncio.to_thread(served.inspect, "Target")
    assert [len(replica["rank_pids"]) for replica in before] == [2, 2]
    for replica in before:  # so that streams of either target are interrupted
        assert await stream_all(served, kill=replica["rank_pids"][1]) == texts
        await asyncio.to_thread(eventually, partial(has_two, served, replica["pid"]), "there are two again", 180)


def has_two(served: Served, lost: int) -> bool:
    """Returns whether the target pool has two live replicas besides a lost one."""
    return len({replica["pid"] for replica in served.inspect("Target")} - {lost}) == 2
