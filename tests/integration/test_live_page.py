"""Tests the live page's data over HTTP, from a real router, drafter and target over gRPC with toy models."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch

from serve_app.page.routes import PageWatch, Sample, draft_sample, page_routes, target_sample
from tests.asgi_front import byte_codec, config_of, http_client, stream_events, toy_api
from tests.byte_tokenizer import byte_tokenizer
from tests.integration.harness import CONTEXT, LOGITS, Cluster, cluster, plain_greedy

# A partly right draft: its likeliest next token is wrong after half of all tokens.
HALF_RIGHT = torch.where(torch.arange(len(LOGITS))[:, None] % 2 == 0, LOGITS, LOGITS.flip(1))


@asynccontextmanager
async def front(of: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of the cluster's API and page."""

    async def collect() -> Sequence[Sample]:
        drafters = [draft_sample(one, one.peer_id, "toy") for one in of.drafters.values()]
        return [*drafters, *(target_sample(one, one.peer_id) for one in of.targets.values())]

    clock = iter(range(1000))  # a new round of samples for each request
    watch = PageWatch("toy", collect, lambda: float(next(clock)))
    async with http_client(
        toy_api(of.router, byte_codec(), config_of({}, CONTEXT), further=page_routes(watch))
    ) as http:
        yield http


async def traced(client: httpx.AsyncClient, prompt: list[int], **speculation: Any) -> list[dict[str, Any]]:
    """Returns the speculation data in the events of a streamed answer."""
    body = {"model": "toy", "prompt": prompt, "max_tokens": 40, "temperature": 0, "stream": True}
    answer = await client.post("/v1/completions", json=body | {"speculation": {"draft_tokens": 4} | speculation})
    assert answer.status_code == 200, answer.text
    return [event.get("slipstream") for event in stream_events(answer.text)]


@pytest.fixture
async def toy() -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    async with cluster(draft_logits=HALF_RIGHT, lock_step=True) as pair, front(pair) as client:
        yield pair, client


async def test_rejected_tokens_are_streamed_at_their_position(toy: tuple[Cluster, httpx.AsyncClient]) -> None:
    """A rejected draft is the draft model's own continuation."""
    _, client = toy
    answer = await traced(client, [1, 2, 3], trace=True, rejected=True)
    pieces = [piece for event in answer for piece in event["pieces"]]
    rejected = [words for event in answer for words in event["rejected"]]
    assert len(pieces) == len(rejected)
    text = byte_tokenizer().decode(plain_greedy((1, 2, 3), 40))
    assert "".join(piece for piece, _ in pieces) == text, "the streamed text is the target's own, whatever is told"
    assert any(rejected), "half of the drafts are wrong"
    assert not any(words for (_, drafted), words in zip(pieces, rejected, strict=True) if drafted)
    draft = text_of_draft()
    for place, words in enumerate(rejected):
        if words:
            before = text[place - 1] if place else chr_of(3)
            assert words[0] == draft[before] != text[place]


def chr_of(token: int) -> str:
    return str(byte_tokenizer().decode([token]))


def text_of_draft() -> dict[str, str]:
    """Returns the draft model's greedy continuation of each token; toy models depend on one token."""
    return {chr_of(token): chr_of(int(HALF_RIGHT[token].argmax())) for token in range(len(LOGITS))}


async def test_rejected_tokens_are_streamed_only_on_request(toy: tuple[Cluster, httpx.AsyncClient]) -> None:
    _, client = toy
    assert all("rejected" not in event for event in await traced(client, [1, 2, 3], trace=True))
    assert all(event is None for event in await traced(client, [1, 2, 3]))


async def test_the_state_reports_both_pools(toy: tuple[Cluster, httpx.AsyncClient]) -> None:
    _, client = toy
    before = (await client.get("/page/state")).json()
    assert before["tokens_per_s"] is None, "there is no sample to compare with"
    assert before["tracks"][0]["bars"] == []
    await traced(client, [1, 2, 3])
    state = (await client.get("/page/state")).json()
    (target,) = state["targets"]
    (drafter,) = state["drafters"]
    assert 0 < target["busy"] <= 1
    assert target["tokens_per_s"] == state["tokens_per_s"] > 0
    assert 0 < state["accepted"] < 1
    assert drafter["draft_tokens_per_s"] > 0
    stages = {track["role"]: {bar[0] for bar in track["bars"]} for track in state["tracks"]}
    assert stages == {"drafter": {"draft"}, "target": {"verify"}}


async def test_the_page_is_served_with_its_files(toy: tuple[Cluster, httpx.AsyncClient]) -> None:
    _, client = toy
    page = await client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("page.css", "answer.css", "page.js", "icon.svg"):
        assert f'"page/{name}"' in page.text
        assert (await client.get(f"/page/{name}")).status_code == 200
