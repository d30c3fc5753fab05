"""Tests an application that serves several models: routing by name, limits and metrics of each."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cluster.config import SlipstreamConfig, validated
from cluster.errors import CapacityError
from cluster.routing.ledger import CommittedTokens, Ended
from protos.messages import Finish
from serve_app.api.metrics import Metrics
from serve_app.api.routes import ModelService, create_api
from serve_app.api.validation import GenerationDefaults
from tests.asgi_front import byte_codec, healthy, http_client
from tests.scripted_generator import ScriptedGenerator

NAMES = ("a", "org/B")


def config_of_two() -> SlipstreamConfig:
    models = {
        "a": {"model": {"target": "t", "max_context": 64}},
        "b": {"model": {"target": "u", "served_name": "org/B", "max_context": 16}},
    }
    return validated({"models": models, "draft": {"method": "ngram"}})


@dataclass
class Front:
    http: httpx.AsyncClient
    generators: dict[str, ScriptedGenerator]
    metrics: Metrics

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, **fields})


@asynccontextmanager
async def front() -> AsyncIterator[Front]:
    config, codec = config_of_two(), byte_codec()
    generators = {
        name: ScriptedGenerator([CommittedTokens(codec.encode(f"{at}{at}"), 0, 0), Ended(Finish.LENGTH)])
        for at, name in enumerate(NAMES)
    }
    metrics = Metrics(by_model={name: Metrics(model=name) for name in NAMES})
    defaults = {"a": GenerationDefaults(temperature=0.0), "org/B": GenerationDefaults(temperature=0.5)}
    models = [ModelService(generators[one.name], codec, one.config, defaults[one.name]) for one in config.served]
    async with http_client(create_api(models, config, metrics, healthy)) as http:
        yield Front(http, generators, metrics)


async def test_the_requested_model_answers_with_its_own_settings() -> None:
    async with front() as served:
        for at, (name, temperature) in enumerate(zip(NAMES, (0.0, 0.5), strict=True)):
            answer = (await served.complete(model=name)).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, f"{at}{at}")
            (generation,) = served.generators[name].generations
            assert (generation.model, generation.sampling.temperature) == (name, temperature)


async def test_all_models_are_listed_with_their_context() -> None:
    async with front() as served:
        cards = (await served.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"], card["max_model_len"]) for card in cards] == [
            ("a", "a", 64),
            ("org/B", "org/B", 16),
        ]
        assert (await served.http.get("/v1/models/org/B")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
async def test_an_unknown_model_is_404_in_openais_form(path: str) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x"},
    }
    async with front() as served:
        answer = await served.http.post(path, json={"model": "other", **bodies.get(path, {"prompt": "x"})})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "'a', 'org/B' are served" in error["message"]


async def test_each_model_has_its_own_limits_and_room() -> None:
    async with front() as served:
        tokens = [1] * 30
        assert (await served.complete(model="a", prompt=tokens)).status_code == 200
        assert (await served.complete(model="org/B", prompt=tokens)).status_code == 400
        served.generators["a"].room, served.generators["a"].refusal = 0, CapacityError("full")
        assert (await served.complete(model="a")).status_code == 429
        assert (await served.complete(model="org/B")).status_code == 200


async def test_requests_are_counted_for_their_model() -> None:
    async with front() as served:
        for fields in ({"model": "a"}, {"model": "org/B"}, {"model": "org/B"}, {"model": "other"}):
            await served.complete(**fields)
        text = served.metrics.exposition().decode()
    counted = {line for line in text.splitlines() if line.startswith("slipstream_requests_total")}
    labels = 'endpoint="completions"'
    assert counted == {
        f'slipstream_requests_total{{{labels},model="a",status="200"}} 1.0',
        f'slipstream_requests_total{{{labels},model="org/B",status="200"}} 2.0',
        f'slipstream_requests_total{{{labels},status="404"}} 1.0',
    }
    assert 'slipstream_running_requests{model="org/B"} 0.0' in text
    assert 'vllm:prompt_tokens_total{model_name="org/B"} 2.0' in text
