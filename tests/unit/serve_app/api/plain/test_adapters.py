"""Tests an application that serves LoRA adapters of a model: names, routing, cache salts and metrics."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from cluster.config import validated
from cluster.routing.ledger import CommittedTokens, Ended
from protos.messages import Finish
from serve_app.api.metrics import Metrics
from serve_app.api.routes import ModelService, create_api
from serve_app.routed_model import RoutedModel
from tests.asgi_front import byte_codec, healthy, http_client
from tests.scripted_generator import ScriptedGenerator

KEY = "sk-one"


def adapted(**server: Any) -> ModelService:
    target = {"engine": "vllm", "vllm": {"enable_lora": True}, "cache_per_rank": {"gib": 1}}
    adapters = {"sql": "org/Sql", "chat": "org/Chat"}
    model = {"target": "org/Base", "max_context": 64}
    config = validated(
        {"model": model, "target": {**target, "adapters": adapters}, "draft": {"method": "ngram"}, "server": server}
    )
    generator = ScriptedGenerator([CommittedTokens((65, 66, 67), 2, 4), Ended(Finish.LENGTH)])
    return ModelService(generator, byte_codec(), config)


@asynccontextmanager
async def serving(service: ModelService) -> AsyncIterator[tuple[httpx.AsyncClient, Metrics]]:
    router: Any = SimpleNamespace(sessions=SimpleNamespace(recoveries={}, handovers={}))
    metrics = Metrics(by_model=RoutedModel("Base", router, service, {}).metrics())
    async with http_client(create_api([service], service.config, metrics, healthy)) as http:
        http.headers["Authorization"] = f"Bearer {KEY}"
        yield http, metrics


async def complete(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, **fields})


async def test_adapters_are_listed_with_their_base() -> None:
    async with serving(adapted()) as (http, _):
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"], card.get("parent"), card["max_model_len"]) for card in cards] == [
            ("Base", "Base", None, 64),
            ("sql", "sql", "Base", 64),
            ("chat", "chat", "Base", 64),
        ]
        assert (await http.get("/v1/models/sql")).json()["parent"] == "Base"


async def test_the_model_of_a_request_selects_its_adapter() -> None:
    service = adapted()
    async with serving(service) as (http, _):
        for name in ("Base", "sql", "chat"):
            assert (await complete(http, model=name)).json()["model"] == name
        refused = await complete(http, model="Sql")
        assert refused.status_code == 404
        assert "'Base', 'sql', 'chat' are served" in refused.json()["error"]["message"]
    generations = cast(ScriptedGenerator, service.generator).generations
    assert [(one.model, one.adapter) for one in generations] == [("Base", ""), ("Base", "sql"), ("Base", "chat")]
    assert [one.open_with(one.prompt, 2).adapter for one in generations] == ["", "sql", "chat"], "kept when moved"


@pytest.mark.parametrize("has_keys", [False, True])
async def test_names_share_no_cached_prefixes(has_keys: bool) -> None:
    keys = {"one": {"sha256": hashlib.sha256(KEY.encode()).hexdigest()}}
    service = adapted(**({"keys": keys} if has_keys else {}))
    async with serving(service) as (http, _):
        for name in ("Base", "sql", "chat", "sql"):
            for salt in ({}, {"cache_salt": "mine"}):
                assert (await complete(http, model=name, **salt)).status_code == 200
    salts = [one.cache_salt for one in cast(ScriptedGenerator, service.generator).generations]
    assert len(set(salts[:6])) == 6
    assert salts[6:] == salts[2:4]


async def test_acceptance_is_counted_by_name() -> None:
    async with serving(adapted()) as (http, metrics):
        for name in ("Base", "sql", "sql"):
            await complete(http, model=name)
        lines = metrics.exposition().decode().splitlines()
    counts = {"Base": 1, "sql": 2, "chat": 0}
    for name, count in counts.items():
        assert f'slipstream_accepted_tokens_total{{model="{name}"}} {2.0 * count}' in lines
        assert f'slipstream_draft_tokens_total{{model="{name}"}} {4.0 * count}' in lines
        assert f'vllm:spec_decode_num_accepted_tokens_total{{model_name="{name}"}} {2.0 * count}' in lines
