"""Tests two models with one draft pool over real Ray, gRPC and HTTP: routing, exact texts and isolation."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.console import Console

from cluster.config import validated
from serve_app.operations.local import serving
from tests.integration.serving import Served, greedy_texts
from tests.integration.test_translation import save_model
from tests.toy_tokenizers import byte_level, sentence_piece

MODELS = ("left", "org/Right")
TOKENS = 48
OPTIONS: Any = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
PROMPTS = ("the quick brown fox", "def add(a, b):\n\treturn", "123 z", "y; w")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two targets with different tokenizers."""
    folder = tmp_path_factory.mktemp("models")
    tokenizers = {"left": byte_level(100), "org/Right": sentence_piece(60)}
    return {name: str(save_model(folder / str(at), one, at)) for at, (name, one) in enumerate(tokenizers.items())}


@pytest.fixture(scope="module")
def served(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serves both models; the draft has the first one's tokenizer."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    sizes = {"dtype": "float32", "max_context": 256}
    always = {"schedule": "lock_step"}  # with targets as small as the draft, drafting does not pay
    config = validated(
        {
            "models": {
                "left": {"model": {"target": folders["left"], **sizes}, "speculation": always},
                "right": {
                    "model": {"target": folders["org/Right"], "served_name": "org/Right", **sizes},
                    "speculation": always,
                },
            },
            "draft": {"model": str(save_model(tmp_path_factory.mktemp("draft"), byte_level(100), 2))},
            "server": {"port": 0, "target_wait_s": 240},  # starting a target takes long on a busy machine
        }
    )
    with serving(config, Console(quiet=True)) as url:
        yield Served(url, config)


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[tuple[str, str], str]:
    """Each model's own greedy continuation of each prompt."""
    texts = {name: greedy_texts(folder, PROMPTS, TOKENS) for name, folder in folders.items()}
    return {(name, prompt): text for name, answers in texts.items() for prompt, text in answers.items()}


def complete(served: Served, model: str, prompt: str) -> str:
    return str(served.client.completions.create(model=model, prompt=prompt, **OPTIONS).choices[0].text)


def samples(served: Served, name: str, **labels: str) -> list[Sample]:
    """Returns the samples with these labels from /metrics."""
    exposition = httpx.get(f"{served.url}/metrics", trust_env=False).text
    found = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]
    return [one for one in found if one.name == name and labels.items() <= one.labels.items()]


def test_one_endpoint_lists_and_serves_both_models(served: Served, expected: dict[tuple[str, str], str]) -> None:
    assert [card.id for card in served.client.models.list().data] == list(MODELS)
    asked = [(model, prompt) for prompt in PROMPTS for model in MODELS]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: complete(served, *one), asked))
    assert dict(zip(asked, answers, strict=True)) == expected


def test_one_drafter_drafts_for_both_models(served: Served) -> None:
    """The test repeats requests, because on a busy machine blocks may be late for such small targets."""

    def received(name: str) -> int:
        (target,) = served.inspect(name)
        return int(target["accepted_tokens"] + target["wasted_tokens"])

    for _ in range(20):
        for model in MODELS:
            complete(served, model, PROMPTS[0])
        if all(received(name) for name in ("Target-left", "Target-right")):
            break
    assert len(served.inspect("Drafter")) == 1
    assert received("Target-left") > 0
    assert received("Target-right") > 0


def test_another_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'other' does not exist; 'left', 'org/Right' are served"):
        complete(served, "other", "x")


def test_metrics_and_health_name_the_models(served: Served) -> None:
    complete(served, "left", PROMPTS[0])
    health = httpx.get(f"{served.url}/health", trust_env=False).json()
    assert health["models"] == dict.fromkeys(MODELS, "ok")
    answered = samples(served, "slipstream_requests_total", status="200")
    assert {one.labels["model"] for one in answered} == set(MODELS)
    assert samples(served, "slipstream_target_seconds_total", model="left", deployment="Target-left")


def test_a_killed_target_does_not_affect_the_other_model(served: Served, expected: dict[tuple[str, str], str]) -> None:
    """Streams of the other model span the loss; a request for the lost model waits for its new target."""
    (lost,) = served.inspect("Target-left")
    has_recovered = threading.Event()

    def stream_until_recovery(prompt: str) -> set[str]:
        texts = set()
        while not has_recovered.is_set():
            stream = served.client.completions.create(model="org/Right", prompt=prompt, stream=True, **OPTIONS)
            texts.add("".join(chunk.choices[0].text for chunk in stream))
        return texts

    with ThreadPoolExecutor(2) as pool:
        streams = {prompt: pool.submit(stream_until_recovery, prompt) for prompt in PROMPTS[:2]}
        os.kill(lost["pid"], signal.SIGKILL)
        try:
            assert complete(served, "left", PROMPTS[0]) == expected["left", PROMPTS[0]]
        finally:
            has_recovered.set()
        for prompt, texts in streams.items():
            assert texts.result() == {expected["org/Right", prompt]}
    moved = [one for one in samples(served, "slipstream_handovers_total", pool="target") if one.value]
    assert {one.labels["model"] for one in moved} <= {"left"}, "no session of the other model moved"
    assert served.inspect("Target-left")[0]["pid"] != lost["pid"]
