"""Requests whose logits overflow fail with their own error, and eight concurrent streams stay unchanged.

Not part of the default suite: `make test-hostile`. The checkpoint's weights are finite, so it loads; one token's
embedding overflows when scaled.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoConfig, GraniteConfig, GraniteForCausalLM

from serve_app.cli.demo import demo_config
from tests.exhaustive.small_target import SIZES, SPREAD, copy_tokenizer
from tests.hostile.test_attacks import STREAMS, WORST, describe
from tests.integration.serving import Served, demo_served
from tests.integration.test_serving import assert_nothing_left

MODEL = "overflowing"
HEALTHY = 30001
BROKEN = 30000  # token whose embedding overflows; its LM-head row is 0, so only a logit bias draws it
SCALE = 16.0  # of embeddings
TOKENS = 400  # per stream
ROUNDS = 2
PROMPT = list(range(100, 140))  # two whole pages, shared by streams and broken requests
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 4, "ignore_eos": True}


def kinds(token: int) -> dict[str, dict[str, Any]]:
    """Returns requests that reach the broken token, by its place."""
    at_end = GREEDY | {"prompt": [*PROMPT, token]}
    after_one = GREEDY | {"prompt": PROMPT, "logit_bias": {str(token): 100}}
    return {
        "in the prompt": GREEDY | {"prompt": [*PROMPT, token, 7]},
        "at its end": at_end,
        "in a long prompt": GREEDY | {"prompt": [token, *PROMPT * 20]},
        "drawn": at_end | {"temperature": 0.8, "top_p": 0.9, "seed": 1},
        "of two choices": at_end | {"n": 2, "temperature": 1, "seed": 1},
        "with log probabilities": at_end | {"logprobs": 2},
        "in a scored prompt": GREEDY | {"prompt": [*PROMPT, token, 7], "logprobs": 1, "echo": True},
        "after a token": after_one,
        "streamed": after_one | {"stream": True},
    }


def make_overflowing_target(folder: Path, demo: Path) -> str:
    """Saves a small Granite, which scales embeddings, with the demo's tokenizer; returns its folder."""
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    like = AutoConfig.from_pretrained(demo)
    config = GraniteConfig(
        **sizes,
        vocab_size=like.vocab_size,
        max_position_embeddings=like.max_position_embeddings,
        bos_token_id=like.bos_token_id,
        eos_token_id=like.eos_token_id,
        embedding_multiplier=SCALE,
        attention_multiplier=SIZES["head_dim"] ** -0.5,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = GraniteForCausalLM(config).float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=SPREAD)
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN] = 1e38
        model.lm_head.weight[BROKEN] = 0
    model.save_pretrained(folder)
    copy_tokenizer(demo, folder)
    return str(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target = make_overflowing_target(tmp_path_factory.mktemp("target"), Path(demo_config([]).model.target))
    draft = "{method: ngram, resources: {num_cpus: 0.5, threads: 1}, max_sessions: 16}"
    where = (f"model.target={target}", f"model.served_name={MODEL}", f"draft={draft}")
    with demo_served(*where, "target.cache_per_rank.gib=0.02") as served:
        yield served
        assert_nothing_left(served)


@dataclass
class StreamRecord:
    """Texts of streams, with the gaps between their events."""

    texts: dict[int, str] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)

    async def follow(self, client: httpx.AsyncClient, number: int) -> None:
        body = GREEDY | {"prompt": [*PROMPT, number], "max_tokens": TOKENS, "stream": True}
        last: float | None = None
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    self.gaps += [now - last] if last is not None else []
                    last = now
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event
                    text += "".join(choice["text"] for choice in event["choices"])
        self.texts[number] = text


async def eight_streams(client: httpx.AsyncClient) -> StreamRecord:
    record = StreamRecord()
    await asyncio.gather(*(record.follow(client, number) for number in range(STREAMS)))
    return record


async def beside(client: httpx.AsyncClient, token: int) -> tuple[StreamRecord, Counter[str]]:
    """Repeats requests with `token` until eight streams end; returns the streams, and answer counts by kind."""
    streaming = asyncio.create_task(eight_streams(client))
    answered: Counter[str] = Counter()
    for name, body in cycle(kinds(token).items()):
        if streaming.done() and answered.keys() == kinds(token).keys():
            break
        answer = await client.post("/v1/completions", json=body)
        check(name, answer, is_broken=token == BROKEN, is_stream="stream" in body)
        answered[name] += 1
    return await streaming, answered


def check(name: str, answer: httpx.Response, is_broken: bool, is_stream: bool) -> None:
    if not is_broken or is_stream:
        assert answer.status_code == 200, (name, answer.text)
    if not is_broken:
        assert "error" not in answer.text, (name, answer.text)
        return
    if is_stream:
        (event,) = [line.removeprefix("data: ") for line in answer.text.splitlines() if "error" in line]
        error = json.loads(event)["error"]
    else:
        assert answer.status_code == 500, (name, answer.text)
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "non_finite_logits"), name


def pids(served: Served) -> list[int]:
    return [one["pid"] for one in served.inspect("Target")]


@pytest.mark.timeout(900)
async def test_overflowing_requests_do_not_affect_running_streams(served: Served) -> None:
    before = await asyncio.to_thread(pids, served)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as client:
        alone = await eight_streams(client)
        assert len(set(alone.texts.values())) == STREAMS
        for _ in range(ROUNDS):
            usual, _ = await beside(client, HEALTHY)  # baseline: healthy requests also delay the streams
            under, answered = await beside(client, BROKEN)
            print(f"\nbeside others {describe(usual.gaps)}; beside overflows {describe(under.gaps)}")
            print(f"  alone {describe(alone.gaps)}; overflows {dict(answered)}")
            assert under.texts == usual.texts == alone.texts
            assert max(under.gaps) < WORST * max(usual.gaps)
        assert (await client.get("/health")).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert "slipstream_nonfinite_logits_total" in metrics
    await asyncio.to_thread(assert_nothing_left, served)
    assert await asyncio.to_thread(pids, served) == before, "a replica was replaced"
