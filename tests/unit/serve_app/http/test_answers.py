"""From committed tokens to deltas, and what following many sessions does when one fails or is left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import count

import pytest

from cluster.errors import TargetLostError
from cluster.routing.session import Emit, Ended, Generation
from protos.messages import Acceptance, Finish, Sampling
from serve_app.http.answers import Choice, Transcript, follow
from serve_app.http.metrics import Metrics
from serve_app.http.text import StopMatcher, TextCodec


def transcript(codec: TextCodec, *stops: str, index: int = 0) -> Transcript:
    return Transcript(index, codec.detokenizer(), StopMatcher(stops))


def test_drafted_text_is_told_from_the_targets_own(codec: TextCodec) -> None:
    choice = transcript(codec)
    delta = choice.extend(Emit(codec.encode("abc"), accepted=2, drafted=4))
    assert delta is not None
    assert delta.pieces == (("a", True), ("b", True), ("c", False))
    assert (delta.text, delta.tokens, delta.accepted, delta.is_first) == ("abc", 3, 2, True)
    assert (choice.tokens, choice.accepted, choice.rejected) == (3, 2, 2)


def test_what_was_rejected_stands_where_the_targets_own_took_its_place(codec: TextCodec) -> None:
    delta = transcript(codec).extend(Emit(codec.encode("abc"), 2, 4, codec.encode("XY")))
    assert delta is not None
    assert delta.rejected == ("", "", "XY")


def test_what_was_rejected_waits_for_the_text_of_its_place(codec: TextCodec) -> None:
    """The target's own token is half a character, and the draft had another half."""
    choice = transcript(codec)
    first, second = codec.encode("é")
    assert choice.extend(Emit((first,), 0, 1, codec.encode("z"))) is None
    delta = choice.extend(Emit((second,), 0, 0))
    assert delta is not None
    assert (delta.text, delta.rejected) == ("é", ("z",))


def test_what_was_rejected_is_told_once_though_its_text_is_cut_by_a_stop_string(codec: TextCodec) -> None:
    choice = transcript(codec, "END")
    held = choice.extend(Emit(codec.encode("E"), 0, 1, codec.encode("x")))
    assert held is None
    told = choice.extend(Emit(codec.encode("a"), 0, 0))
    assert told is not None
    assert (told.pieces, told.rejected) == ((("E", False), ("a", False)), ("x", ""))


def test_a_token_that_has_a_name_is_shown_by_it(codec: TextCodec) -> None:
    delta = transcript(codec).extend(Emit(codec.encode("a"), 0, 1, codec.eos_ids))
    assert delta is not None
    assert delta.rejected == ("<eos>",)


def test_tokens_without_text_are_told_with_the_next_delta(codec: TextCodec) -> None:
    choice = transcript(codec)
    first, second = codec.encode("é")
    assert choice.extend(Emit((first,), accepted=0, drafted=1)) is None
    delta = choice.extend(Emit((second,), accepted=1, drafted=1))
    assert delta is not None
    assert (delta.text, delta.tokens, delta.accepted) == ("é", 2, 1)


def test_text_that_was_held_for_a_stop_string_keeps_its_origin(codec: TextCodec) -> None:
    choice = transcript(codec, "END")
    held = choice.extend(Emit(codec.encode("xEN"), accepted=2, drafted=2))
    assert held is not None
    assert held.pieces == (("x", True),)
    delta = choice.extend(Emit(codec.encode("!"), accepted=0, drafted=0))
    assert delta is not None
    assert delta.pieces == (("E", True), ("N", False), ("!", False))


def test_at_an_interval_several_tokens_share_a_delta(codec: TextCodec) -> None:
    """The first comes at once, the last whatever it holds, and nothing is lost between."""
    choice = Transcript(0, codec.detokenizer(), StopMatcher(()), interval=3)
    emits = [Emit(codec.encode(text), accepted=1, drafted=2) for text in ("a", "b", "cd", "e")]
    first, *rest = [choice.extend(emit) for emit in emits]
    assert first is not None
    assert (first.text, first.tokens) == ("a", 1)
    assert [delta and (delta.text, delta.tokens, delta.accepted) for delta in rest] == [None, ("bcd", 3, 2), None]
    last = choice.end(Finish.LENGTH)
    assert (last.text, last.tokens, last.accepted, last.finish) == ("e", 1, 1, "length")
    assert choice.text == "abcde"


def test_a_stop_string_does_not_wait_for_the_interval(codec: TextCodec) -> None:
    choice = Transcript(0, codec.detokenizer(), StopMatcher("!"), interval=100)
    assert choice.extend(Emit(codec.encode("a"), accepted=0, drafted=0)) is not None
    delta = choice.extend(Emit(codec.encode("b!c"), accepted=0, drafted=0))
    assert delta is not None
    assert (delta.text, delta.finish) == ("b", "stop")


def test_a_stop_string_ends_the_choice_inside_a_block(codec: TextCodec) -> None:
    choice = transcript(codec, "\n")
    delta = choice.extend(Emit(codec.encode("a\nbc"), accepted=3, drafted=3))
    assert delta is not None
    assert (delta.text, delta.finish) == ("a", "stop")
    assert (choice.tokens, choice.accepted, choice.rejected) == (2, 2, 0)


@pytest.mark.parametrize(("finish", "reason"), [(Finish.STOP, "stop"), (Finish.LENGTH, "length")])
def test_the_end_gives_out_what_was_held(codec: TextCodec, finish: Finish, reason: str) -> None:
    choice = transcript(codec, "END")
    choice.extend(Emit((*codec.encode("xEN"), *codec.eos_ids), accepted=0, drafted=0))
    delta = choice.end(finish)
    assert (delta.text, delta.finish, choice.text, choice.tokens) == ("EN", reason, "xEN", 4)


class Scripted:
    """Plays one list of outputs for each choice; `None` waits for ever."""

    def __init__(self, *scripts: list[Emit | Ended | Exception | None]) -> None:
        self.scripts = scripts
        self.closed: list[int] = []

    async def generate(self, generation: Generation) -> AsyncIterator[Emit | Ended]:
        try:
            for output in self.scripts[generation.choice]:
                if isinstance(output, Exception):
                    raise output
                if output is None:
                    await asyncio.Event().wait()
                else:
                    yield output
        finally:
            self.closed.append(generation.choice)


def generation(choice: int) -> Generation:
    return Generation(f"s{choice}", (1,), 32, (), Sampling(), 0, 0, choice, 0, Acceptance.COUPLED, 4)


def choices(codec: TextCodec, number: int, *stops: str) -> list[Choice]:
    return [Choice(generation(index), transcript(codec, *stops, index=index)) for index in range(number)]


async def test_choices_run_at_once(codec: TextCodec) -> None:
    ended = [Emit(codec.encode("a"), 0, 0), Ended(Finish.STOP)]
    generator = Scripted([None], ended)
    async with aclosing(follow(generator, choices(codec, 2), Metrics(), count().__next__)) as deltas:
        first = await anext(deltas)
        second = await anext(deltas)
    assert [(first.index, first.text), (second.index, second.finish)] == [(1, "a"), (1, "stop")]
    assert sorted(generator.closed) == [0, 1]


async def test_one_failure_ends_all_and_is_raised_as_it_is(codec: TextCodec) -> None:
    generator = Scripted([None], [Emit(codec.encode("a"), 0, 0), TargetLostError("gone")])
    deltas = follow(generator, choices(codec, 2), Metrics(), count().__next__)
    assert (await anext(deltas)).text == "a"
    with pytest.raises(TargetLostError, match="gone"):
        await anext(deltas)
    assert sorted(generator.closed) == [0, 1]


async def test_what_waits_for_the_interval_is_given_out_before_a_failure(codec: TextCodec) -> None:
    emits = [Emit(codec.encode(text), 0, 0) for text in ("a", "b")]
    generator = Scripted([*emits, TargetLostError("gone")])
    choice = Choice(generation(0), Transcript(0, codec.detokenizer(), StopMatcher(()), interval=100))
    deltas = follow(generator, [choice], Metrics(), count().__next__)
    assert [(await anext(deltas)).text, (await anext(deltas)).text] == ["a", "b"]
    with pytest.raises(TargetLostError, match="gone"):
        await anext(deltas)


async def test_a_stop_string_closes_the_session(codec: TextCodec) -> None:
    generator = Scripted([Emit(codec.encode("a."), 1, 1), None])
    async with aclosing(follow(generator, choices(codec, 1, "."), Metrics(), count().__next__)) as deltas:
        assert [delta.text async for delta in deltas] == ["a"]
    assert generator.closed == [0]


async def test_closing_closes_sessions_and_leaves_no_task(codec: TextCodec) -> None:
    generator = Scripted([Emit(codec.encode("a"), 0, 0), None], [None])
    deltas = follow(generator, choices(codec, 2), Metrics(), count().__next__)
    await anext(deltas)
    await deltas.aclose()
    assert sorted(generator.closed) == [0, 1]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_time_is_measured_by_verdict(codec: TextCodec) -> None:
    metrics = Metrics()
    generator = Scripted([Emit((1,), 0, 0), Emit((1, 2), 1, 4), Emit((1,), 0, 3), Ended(Finish.LENGTH)])
    async for _ in follow(generator, choices(codec, 1), metrics, count().__next__):
        pass
    sample = metrics.registry.get_sample_value
    assert sample("slipstream_time_to_first_token_seconds_count") == 1
    assert sample("slipstream_inter_token_seconds_count") == 2
    assert sample("slipstream_inter_token_seconds_sum") == 2
