"""Tests learning consent by deployment, key and request, from the HTTP request to the files on disk."""

import hashlib
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import torch

from actors.learning.examples import ExampleStore, ExampleWriter
from cluster.learning import Source
from tests.asgi_front import codec_of, config_of, http_client, toy_api
from tests.byte_tokenizer import byte_tokenizer
from tests.integration.harness import CONTEXT, cluster

TOKENIZER = byte_tokenizer()
VOCABULARY = len(TOKENIZER)
LOGITS = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(7))
KEYS = {"open": {"sha256": hashlib.sha256(b"sk-open").hexdigest()}}
KEYS["closed"] = {"sha256": hashlib.sha256(b"sk-closed").hexdigest(), "learn": False}


def opened(folder: Path) -> ExampleStore:
    return ExampleStore(folder, 1_000_000, 86_400.0)


@asynccontextmanager
async def front(folder: Path, consent: str) -> AsyncIterator[httpx.AsyncClient]:
    """Runs a learning server with the given consent; on exit, all examples are written."""
    writer = ExampleWriter(lambda: opened(folder), "toy")
    async with cluster(logits=LOGITS, examples=writer.offer, lock_step=True) as c:
        c.hurry()
        learning = {"folder": str(folder), "consent": consent}
        draft = {"model": "models/draft", "learning": learning}
        config = config_of({"keys": KEYS}, CONTEXT, draft=draft)
        async with http_client(toy_api(c.router, codec_of(TOKENIZER), config)) as client:
            yield client
    writer.close()


async def answer(client: httpx.AsyncClient, key: str, seed: int, learn: str | None) -> str:
    metadata = {"prompt_version": "v1"} | ({} if learn is None else {"learn": learn})
    body = {"model": "toy", "prompt": f"request {seed}", "max_tokens": 48, "seed": seed, "metadata": metadata}
    headers = {"Authorization": f"Bearer sk-{key}"}
    reply = await client.post("/v1/completions", json=body | {"ignore_eos": True}, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


async def served(client: httpx.AsyncClient) -> dict[tuple[str, str | None], str]:
    """Returns stored texts by key and choice."""
    cases = [(key, learn) for key in ("open", "closed") for learn in (None, "true", "false")]
    return {case: await answer(client, case[0], seed, case[1]) for seed, case in enumerate(cases)}


def on_disk(folder: Path, prompt: str) -> bool:
    tokens: Sequence[int] = TOKENIZER.encode(prompt, add_special_tokens=False)
    data = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return array("i", tokens).tobytes() in data or prompt.encode() in data


async def test_only_agreed_answers_reach_the_disk(tmp_path):
    kept_with = {"opted_in": [("open", "true")], "all": [("open", None), ("open", "true")]}
    for consent, kept in kept_with.items():
        folder = tmp_path / consent
        async with front(folder, consent) as client:
            texts = await served(client)
        store = opened(folder)
        examples = store.read("toy")
        store.close()
        assert [TOKENIZER.decode(each.answer, skip_special_tokens=True) for each in examples] == [
            texts[case] for case in kept
        ]
        assert {each.source for each in examples} == {Source("open", "v1")}
        found = [on_disk(folder, f"request {seed}") for seed in range(6)]
        assert found == [case in kept for case in texts]


async def test_a_choice_that_is_no_choice_is_refused(tmp_path):
    async with front(tmp_path, "all") as client:
        body = {"model": "toy", "prompt": "x", "max_tokens": 4, "metadata": {"learn": "yes"}}
        reply = await client.post("/v1/completions", json=body, headers={"Authorization": "Bearer sk-open"})
    assert reply.status_code == 400
    assert 'learn must be "true" or "false"' in reply.json()["error"]["message"]


async def test_an_answer_that_its_client_or_a_stop_string_cuts_short_is_learned_from(tmp_path):
    async with front(tmp_path, "all") as client:
        whole = await answer(client, "open", 0, None)
        body = {"model": "toy", "prompt": "request 1", "max_tokens": 48, "seed": 0, "ignore_eos": True}
        headers = {"Authorization": "Bearer sk-open"}
        url = "/v1/completions"
        stopped = await client.post(url, json=body | {"prompt": "request 0", "stop": whole[20:23]}, headers=headers)
        assert whole.startswith(stopped.json()["choices"][0]["text"])
        async with client.stream("POST", url, json=body | {"stream": True, "seed": 5}, headers=headers) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data:"):
                    break
    store = opened(tmp_path)
    examples = store.read("toy")
    store.close()
    prompts = [TOKENIZER.decode(each.prompt, skip_special_tokens=True) for each in examples]
    assert prompts == ["request 0", "request 0", "request 1"]
    assert TOKENIZER.decode(examples[0].answer, skip_special_tokens=True) == whole
    assert len(examples[1].answer) < len(examples[0].answer)
