"""Tests that text chunks, which are written from a template, equal their models' JSON."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.choices import ChoiceEvent
from serve_app.api.formats import ChatFormat, CompletionFormat, Head
from serve_app.api.replies import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    CompletionChoice,
    CompletionChunk,
    Usage,
)
from serve_app.api.text import TextCodec
from serve_app.api.tool_calls import Content, Reasoning
from tests.unit.serve_app.api.sample_requests import chat, completion

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=3)
STREAM_OPTIONS = st.sampled_from([{}, {"include_usage": True}])
HEADS = st.builds(Head, id=st.text(), created=st.integers(0), model=st.text(), system_fingerprint=st.just("fp"))


def no_usage() -> Usage:
    raise AssertionError("these chunks report no usage")


def excluded(options: dict[str, bool]) -> dict[str, Any]:
    return {"metrics": True, "slipstream": True} | ({} if options else {"usage": True})


@given(head=HEADS, texts=TEXTS, index=st.integers(0, 9), options=STREAM_OPTIONS)
def test_completion_chunks(codec: TextCodec, head: Head, texts: list[str], index: int, options: Any) -> None:
    writer = CompletionFormat().writer(completion(stream=True, stream_options=options), head, codec)
    for text in texts:
        choice = CompletionChoice(index=index, text=text, finish_reason=None)
        whole = CompletionChunk(**head, choices=(choice,)).model_dump_json(exclude=excluded(options))
        assert list(writer.event(ChoiceEvent(index, Content(text)), no_usage)) == [f"data: {whole}\n\n"]


@pytest.mark.parametrize("kind", [Content, Reasoning])
@given(head=HEADS, texts=TEXTS, index=st.integers(0, 9), options=STREAM_OPTIONS)
def test_chat_chunks(codec: TextCodec, kind: Any, head: Head, texts: list[str], index: int, options: Any) -> None:
    writer = ChatFormat().writer(chat(stream=True, stream_options=options), head, codec)
    for text in texts:
        delta = ChatDelta(content=text) if kind is Content else ChatDelta(reasoning=text, reasoning_content=text)
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=None)
        whole = ChatChunk(**head, choices=(choice,)).model_dump_json(exclude=excluded(options))
        assert list(writer.event(ChoiceEvent(index, kind(text)), no_usage)) == [f"data: {whole}\n\n"]
