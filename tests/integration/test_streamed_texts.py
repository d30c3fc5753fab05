"""Streams of random texts over HTTP: wherever tokens and blocks end, the client gets the text, and no more."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from cluster.routing.ledger import CommittedTokens, Ended
from protos.messages import Finish
from serve_app.api.replies import CompletionChunk
from serve_app.api.text import TextCodec
from tests.asgi_front import config_of, http_client, toy_api
from tests.byte_tokenizer import TEMPLATE, byte_tokenizer
from tests.scripted_generator import Script, ScriptedGenerator

RESPONSE_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CASES = 75  # of each tokenizer
LETTERS = ["a", "b ", "é", "ñ", "日本", "한", "नमस्ते", "\n", "{", '"']
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4000}
MARKS = ["e\u0301", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "👍🏽", "\ufffd"]


def byte_fallback() -> Any:
    """Returns a tokenizer like SentencePiece's: few characters have tokens, the others are spelled in bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "日": 258}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    built.normalizer = normalizers.Replace(" ", "▁")
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=built, chat_template=TEMPLATE)


TOKENIZERS = pytest.mark.parametrize("tokenizer", [byte_tokenizer(), byte_fallback()], ids=["bytes", "byte fallback"])


def blocks(tokens: tuple[int, ...], rejected: tuple[int, ...], rng: random.Random) -> Iterator[CommittedTokens]:
    """The tokens as verdicts bring them: some accepted ones, then one that may have taken a rejected draft's place."""
    while tokens:
        count = rng.randint(1, 9)
        given = tokens[:count]
        tokens = tokens[count:]
        lost = rejected[: rng.randint(0, 4)]
        yield CommittedTokens(given, len(given) - 1, len(given) - 1 + len(lost), rejected=lost)


async def streamed(codec: TextCodec, script: Script, interval: int, **fields: Any) -> list[dict[str, Any]]:
    """The events of one chat, each a valid one."""
    *events, last = await asked(codec, script, interval, "/v1/chat/completions", **CHAT, **fields)
    assert last == "[DONE]"
    data = [json.loads(event) for event in events]
    for event in data:
        ChatCompletionChunk.model_validate(event, strict=True)
    return data


async def asked(codec: TextCodec, script: Script, interval: int, path: str, **fields: Any) -> list[str]:
    """The data of a stream's events."""
    generator = ScriptedGenerator(script)
    body = {"model": "toy", "stream": True, **fields}
    async with http_client(toy_api(generator, codec, config_of({"stream_interval": interval}))) as client:
        answer = await client.post(path, json=body)
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    assert not generator.running
    return [event.partition("data: ")[2] for event in events]


@TOKENIZERS
async def test_any_text_arrives_whole_and_without_its_stop_string(tokenizer: Any) -> None:
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


PIECES = st.sampled_from(LETTERS + MARKS) | st.characters(codec="utf-8", exclude_characters="<")
TEXTS = st.lists(PIECES, max_size=30).map("".join)


def cut(text: str, stops: list[str], keeps_stop: bool) -> str:
    """Cuts before, or after, the first complete stop string; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[:end] if keeps_stop else text[: end - max(complete)]
    return text


@TOKENIZERS
@settings(deadline=None, max_examples=25)
@given(text=TEXTS, rng=st.randoms(use_true_random=False), keeps_stop=st.booleans())
async def test_a_completion_ends_at_the_first_of_many_stop_strings(
    tokenizer: Any, text: str, rng: random.Random, keeps_stop: bool
) -> None:
    codec = TextCodec(tokenizer, ())
    begins = [rng.randrange(len(text)) for _ in range(rng.randint(0, 3)) if text]
    stops = [text[begin : begin + rng.randint(1, 6)] for begin in begins]
    script: Script = [*blocks(codec.encode_plain(text), (), rng), Ended(Finish.STOP)]
    fields = {"prompt": "a", "max_tokens": 4000, "stop": stops, "include_stop_str_in_output": keeps_stop}
    *events, last = await asked(codec, script, rng.choice([1, 3]), "/v1/completions", **fields)
    assert last == "[DONE]"
    # OpenAI's own type has no place for an end that has not come, which its chunks have.
    chunks = [CompletionChunk.model_validate_json(event, strict=True) for event in events]
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut(text, stops, keeps_stop)


@TOKENIZERS
@settings(deadline=None, max_examples=25)
@given(text=TEXTS, rng=st.randoms(use_true_random=False))
async def test_response_events_add_up_to_the_final_text(tokenizer: Any, text: str, rng: random.Random) -> None:
    codec = TextCodec(tokenizer, ())
    script: Script = [*blocks(codec.encode_plain(text), (), rng), Ended(Finish.STOP)]
    told = await asked(codec, script, rng.choice([1, 3]), "/v1/responses", input="a")
    events = [RESPONSE_EVENTS.validate_json(event) for event in told]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == text
