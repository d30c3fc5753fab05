"""Streams of random texts over HTTP: wherever tokens and blocks end, the client gets the text, and no more."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionChunk
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from cluster.config import validated
from cluster.routing.session import Emit, Ended
from protos.messages import Finish
from serve_app.http.api import create_api
from serve_app.http.metrics import Metrics
from serve_app.http.text import TextCodec
from serve_app.http.wire.replies import HealthReport
from tests.byte_tokenizer import TEMPLATE, byte_tokenizer
from tests.integration.scripted_generator import Script, ScriptedGenerator

CASES = 150  # of each tokenizer
LETTERS = ["a", "b ", "é", "ñ", "日本", "한", "नमस्ते", "\n", "{", '"']
MARKS = ["e\u0301", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "👍🏽", "\ufffd"]


def byte_fallback() -> Any:
    """As SentencePiece's: few characters have tokens, the others are spelt in bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "日": 258}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    built.normalizer = normalizers.Replace(" ", "▁")
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=built, chat_template=TEMPLATE)


def blocks(tokens: tuple[int, ...], rejected: tuple[int, ...], rng: random.Random) -> Iterator[Emit]:
    """The tokens as verdicts bring them: some accepted ones, then one that may have taken a rejected draft's place."""
    while tokens:
        count = rng.randint(1, 9)
        given = tokens[:count]
        tokens = tokens[count:]
        lost = rejected[: rng.randint(0, 4)]
        yield Emit(given, len(given) - 1, len(given) - 1 + len(lost), rejected=lost)


async def streamed(codec: TextCodec, script: Script, interval: int, **fields: Any) -> list[dict[str, Any]]:
    """The events of one chat, each a valid one."""
    generator = ScriptedGenerator()
    generator.scripts = [script]
    config = validated(
        {
            "model": {"target": "models/toy", "max_context": 4096},
            "draft": {"method": "prompt_lookup"},
            "server": {"stream_interval": interval},
        }
    )

    async def health() -> HealthReport:
        return HealthReport(status="ok", audit="off")

    transport = httpx.ASGITransport(create_api(generator, codec, config, Metrics(), health))
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 4000,
        "stream": True,
        **fields,
    }
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
        answer = await client.post("/v1/chat/completions", json=body)
    *events, last = answer.text.split("\n\n")[:-1]
    assert last == "data: [DONE]"
    data = [json.loads(event.removeprefix("data: ")) for event in events]
    for event in data:
        ChatCompletionChunk.model_validate(event, strict=True)
    assert not generator.running
    return data


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), byte_fallback()], ids=["bytes", "byte fallback"])
async def test_any_text_cut_anywhere_arrives_as_it_is_and_nothing_of_a_stop_string(tokenizer: Any) -> None:
    codec = TextCodec(tokenizer, ())
    for seed in range(CASES):
        rng = random.Random(seed)
        text = "".join(rng.choices(LETTERS + MARKS, k=rng.randint(1, 40)))
        begin = rng.randrange(len(text))
        stop = text[begin : begin + rng.randint(1, 6)] if seed % 2 else ""
        script: Script = [*blocks(codec.encode(text), codec.encode("日x"), rng), Ended(Finish.STOP)]
        asked = {"stop": stop} if stop else {}
        speculation = {"trace": True, "rejected": True}
        events = await streamed(codec, script, rng.choice([1, 1, 3, 20]), speculation=speculation, **asked)
        texts = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(texts) == (text.partition(stop)[0] if stop else text), seed
        assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
        for event, gained in zip(events, texts, strict=True):
            told = event["slipstream"]
            assert "".join(piece for piece, _ in told["pieces"]) == gained
            assert len(told["rejected"]) == len(told["pieces"])
