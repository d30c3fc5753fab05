"""Tests deltas from committed tokens, and requests with several sessions."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

import pytest

from cluster.errors import TargetLostError
from cluster.routing.ledger import CommittedTokens, Ended, Event, Generation
from protos.messages import Finish, TokenScore
from serve_app.api.choices import Choice, ChoiceStream, ChoiceStreamOptions, ChoiceText, Delta, TextOptions
from serve_app.api.generation import follow, metrics_of
from serve_app.api.metrics import Metrics
from serve_app.api.text import StopMatcher, TextCodec
from serve_app.api.tool_calls import PlainReader
from tests.scripted_generator import STALL, ScriptedGenerator
from tests.toys import a_generation


def choice_text(codec: TextCodec, *stops: str, index: int = 0) -> ChoiceText:
    return ChoiceText(index, codec.detokenizer(), StopMatcher(stops))


def rejected(delta: Delta) -> list[str]:
    return [piece.rejected for piece in delta.pieces]


def test_drafted_text_is_marked(codec: TextCodec) -> None:
    choice = choice_text(codec)
    delta = choice.extend(CommittedTokens(codec.encode("abc"), accepted=2, drafted=4))
    assert tuple(piece[:3] for piece in delta.pieces) == (("a", True, ""), ("b", True, ""), ("c", False, ""))
    assert (delta.text, delta.tokens, delta.accepted, delta.is_first) == ("abc", 3, 2, True)
    assert (choice.tokens, choice.accepted, choice.rejected) == (3, 2, 2)


def test_draft_metrics_are_summed_over_choices(codec: TextCodec) -> None:
    first = choice_of(choice_text(codec))
    other = choice_of(choice_text(codec, "c", index=1))
    assert metrics_of([first, other]) is None
    first.text.extend(CommittedTokens(codec.encode("abc"), accepted=2, drafted=4))
    first.text.extend(CommittedTokens(codec.encode("d"), accepted=0, drafted=0))
    other.text.extend(CommittedTokens(codec.encode("abcd"), accepted=3, drafted=3))
    other.text.extend(CommittedTokens(codec.encode("e"), accepted=0, drafted=1))
    metrics = metrics_of([first, other])
    decoding = metrics.speculative_decoding
    most = first.generation.draft_tokens
    assert decoding.acceptance_histogram == (1, 0, 1, 1, *[0] * (most - 3))
    assert (decoding.num_spec_tokens, decoding.num_spec_steps) == (most, 3)
    assert (decoding.num_draft_tokens, decoding.num_accepted_draft_tokens) == (8, 5)
    assert (decoding.draft_acceptance_rate, decoding.mean_acceptance_length) == (5 / 8, 1 + 5 / 3)


def test_stop_reason_is_reported_if_the_request_named_it(codec: TextCodec) -> None:
    by_string = choice_text(codec, "END", "ND")
    delta = by_string.extend(CommittedTokens(codec.encode("aENDb"), 0, 0))
    assert (delta.finish, delta.stop_reason) == ("stop", "END")
    (newline,) = codec.encode("\n")
    for named, reason in ((frozenset({newline}), newline), (frozenset[int](), None)):
        choice = formed(codec, stop_ids=frozenset({newline}), named_stop_ids=named)
        choice.extend(CommittedTokens((*codec.encode("a"), newline), 1, 1))
        assert choice.end(Finish.STOP).stop_reason == reason
        longer = formed(codec, stop_ids=frozenset({newline}), named_stop_ids=named)
        longer.extend(CommittedTokens(codec.encode("a"), 1, 1))
        assert longer.end(Finish.LENGTH).stop_reason is None


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.STOP])
def test_a_stop_string_in_the_last_unfinished_character_is_reported(codec: TextCodec, finish: Finish) -> None:
    half, _ = codec.encode("é")
    choice = formed(codec, "\ufffd", named_stop_ids=frozenset({half}))
    assert choice.extend(CommittedTokens((half,), 0, 0)) is None
    end = choice.end(finish)
    assert (end.text, end.finish, end.stop_reason) == ("", "stop", "\ufffd")


def test_rejected_text_is_reported_at_the_replacing_token(codec: TextCodec) -> None:
    delta = choice_text(codec).extend(CommittedTokens(codec.encode("abc"), 2, 4, rejected=codec.encode("XY")))
    assert delta is not None
    assert rejected(delta) == ["", "", "XY"]


def test_rejected_text_waits_for_the_text_of_its_token(codec: TextCodec) -> None:
    """The target's token is half a character, and the draft's token was another half."""
    choice = choice_text(codec)
    first, second = codec.encode("é")
    assert choice.extend(CommittedTokens((first,), 0, 1, rejected=codec.encode("z"))) is None
    delta = choice.extend(CommittedTokens((second,), 0, 0))
    assert (delta.text, rejected(delta)) == ("é", ["z"])


def test_rejected_text_held_for_a_stop_string_is_reported_once(codec: TextCodec) -> None:
    choice = choice_text(codec, "END")
    held = choice.extend(CommittedTokens(codec.encode("E"), 0, 1, rejected=codec.encode("x")))
    assert held is None
    delta = choice.extend(CommittedTokens(codec.encode("a"), 0, 0))
    assert tuple(piece[:3] for piece in delta.pieces) == (("E", False, "x"), ("a", False, ""))


def test_rejected_special_tokens_are_shown_by_name(codec: TextCodec) -> None:
    delta = choice_text(codec).extend(CommittedTokens(codec.encode("a"), 0, 1, rejected=codec.eos_ids))
    assert delta is not None
    assert rejected(delta) == ["<eos>"]


def test_rejected_text_within_min_tokens_is_reported(codec: TextCodec) -> None:
    choice = formed(codec, "b", min_tokens=2)
    delta = choice.extend(CommittedTokens(codec.encode("ab"), 1, 2, rejected=codec.encode("X")))
    assert (delta.text, rejected(delta)) == ("ab", ["", "X"])


def test_an_echoed_prompt_has_its_own_rejected_piece(codec: TextCodec) -> None:
    choice = formed(codec, echoed=codec.encode("hi"), echoed_text="hi")
    delta = choice.extend(CommittedTokens(codec.encode("a"), 0, 1, rejected=codec.encode("X")))
    assert tuple(piece[:3] for piece in delta.pieces) == (("hi", False, ""), ("a", False, "X"))


def test_tokens_without_text_are_counted_in_the_next_delta(codec: TextCodec) -> None:
    choice = choice_text(codec)
    first, second = codec.encode("é")
    assert choice.extend(CommittedTokens((first,), accepted=0, drafted=1)) is None
    delta = choice.extend(CommittedTokens((second,), accepted=1, drafted=1))
    assert (delta.text, delta.tokens, delta.accepted) == ("é", 2, 1)


def test_text_held_for_a_stop_string_keeps_its_origin(codec: TextCodec) -> None:
    choice = choice_text(codec, "END")
    held = choice.extend(CommittedTokens(codec.encode("xEN"), accepted=2, drafted=2))
    assert tuple(piece[:3] for piece in held.pieces) == (("x", True, ""),)
    delta = choice.extend(CommittedTokens(codec.encode("!"), accepted=0, drafted=0))
    assert tuple(piece[:3] for piece in delta.pieces) == (("E", True, ""), ("N", False, ""), ("!", False, ""))


def test_a_token_whose_text_is_split_for_a_stop_string_counts_once(codec: TextCodec) -> None:
    choice = ChoiceText(0, codec.detokenizer(skips_special=False), StopMatcher(["s>x"]))
    eos = codec.tokenizer.eos_token_id
    first = choice.extend(CommittedTokens((eos,), 0, 0))
    last = choice.extend(CommittedTokens(codec.encode("é"), 0, 0))
    assert [(piece.text, piece.tokens) for piece in (*first.pieces, *last.pieces)] == [("<eo", 0), ("s>", 1), ("é", 2)]


def test_with_an_interval_several_tokens_share_a_delta(codec: TextCodec) -> None:
    """The first delta is immediate, the last is always sent, and no token is lost in between."""
    choice = ChoiceText(0, codec.detokenizer(), StopMatcher(()), interval=3)
    emits = [CommittedTokens(codec.encode(text), accepted=1, drafted=2) for text in ("a", "b", "cd", "e")]
    first, *rest = [choice.extend(emit) for emit in emits]
    assert (first.text, first.tokens) == ("a", 1)
    assert [delta and (delta.text, delta.tokens, delta.accepted) for delta in rest] == [None, ("bcd", 3, 2), None]
    last = choice.end(Finish.LENGTH)
    assert (last.text, last.tokens, last.accepted, last.finish) == ("e", 1, 1, "length")
    assert choice.text == "abcde"


def test_a_stop_string_does_not_wait_for_the_interval(codec: TextCodec) -> None:
    choice = ChoiceText(0, codec.detokenizer(), StopMatcher("!"), interval=100)
    assert choice.extend(CommittedTokens(codec.encode("a"), accepted=0, drafted=0)) is not None
    delta = choice.extend(CommittedTokens(codec.encode("b!c"), accepted=0, drafted=0))
    assert (delta.text, delta.finish) == ("b", "stop")


def test_a_stop_string_ends_the_choice_inside_a_block(codec: TextCodec) -> None:
    choice = choice_text(codec, "\n")
    delta = choice.extend(CommittedTokens(codec.encode("a\nbc"), accepted=3, drafted=3))
    assert (delta.text, delta.finish) == ("a", "stop")
    assert (choice.tokens, choice.accepted, choice.rejected) == (2, 2, 0)


@pytest.mark.parametrize(("finish", "reason"), [(Finish.STOP, "stop"), (Finish.LENGTH, "length")])
def test_held_text_is_released_at_the_end(codec: TextCodec, finish: Finish, reason: str) -> None:
    choice = choice_text(codec, "END")
    choice.extend(CommittedTokens((*codec.encode("xEN"), *codec.eos_ids), accepted=0, drafted=0))
    delta = choice.end(finish)
    assert (delta.text, delta.finish, choice.text, choice.tokens) == ("EN", reason, "xEN", 4)


def choice_of(text: ChoiceText) -> Choice:
    stream = ChoiceStream(text.index, PlainReader(), ChoiceStreamOptions(), lambda: 0)
    return Choice(a_generation(session=f"s{text.index}", choice=text.index), text, stream)


def choices(codec: TextCodec, number: int, *stops: str) -> list[Choice]:
    return [choice_of(choice_text(codec, *stops, index=index)) for index in range(number)]


async def test_choices_run_at_once(codec: TextCodec) -> None:
    ended = [CommittedTokens(codec.encode("a"), 0, 0), Ended(Finish.STOP)]
    generator = ScriptedGenerator([STALL], ended)
    async with aclosing(follow(generator, choices(codec, 2), Metrics(), count().__next__)) as arrivals:
        first, second = await anext(arrivals)
    assert [(first.index, first.text), (second.index, second.finish)] == [(1, "a"), (1, "stop")]
    assert sorted(generator.closed) == [0, 1]


async def test_one_failure_ends_all_choices_and_is_raised_unchanged(codec: TextCodec) -> None:
    generator = ScriptedGenerator([STALL], [CommittedTokens(codec.encode("a"), 0, 0), TargetLostError("gone")])
    arrivals = follow(generator, choices(codec, 2), Metrics(), count().__next__)
    assert [delta.text for delta in await anext(arrivals)] == ["a"]
    with pytest.raises(TargetLostError, match="gone"):
        await anext(arrivals)
    assert sorted(generator.closed) == [0, 1]


async def test_text_that_waits_for_the_interval_precedes_a_failure(codec: TextCodec) -> None:
    emits = [CommittedTokens(codec.encode(text), 0, 0) for text in ("a", "b")]
    generator = ScriptedGenerator([*emits, TargetLostError("gone")])
    choice = choice_of(ChoiceText(0, codec.detokenizer(), StopMatcher(()), interval=100))
    arrivals = follow(generator, [choice], Metrics(), count().__next__)
    assert [delta.text for delta in await anext(arrivals)] == ["a", "b"]
    with pytest.raises(TargetLostError, match="gone"):
        await anext(arrivals)


async def test_a_stop_string_closes_the_session(codec: TextCodec) -> None:
    generator = ScriptedGenerator([CommittedTokens(codec.encode("a."), 1, 1), STALL])
    async with aclosing(follow(generator, choices(codec, 1, "."), Metrics(), count().__next__)) as arrivals:
        assert [delta.text async for deltas in arrivals for delta in deltas] == ["a"]
    assert generator.closed == [0]


class ManualGenerator(ScriptedGenerator):
    """Generator whose sessions' events the test delivers."""

    deliver: Callable[[Event], None]

    def start(self, generation: Generation, deliver: Callable[[Event], None]) -> Callable[[], None]:
        self.deliver = deliver
        return super().start(generation, deliver)


async def test_a_stop_string_closes_the_session_while_the_client_reads_nothing(codec: TextCodec) -> None:
    generator = ManualGenerator([CommittedTokens(codec.encode("a"), 0, 0), STALL])
    async with aclosing(follow(generator, choices(codec, 1, "."), Metrics(), count().__next__)) as arrivals:
        await anext(arrivals)
        generator.deliver(CommittedTokens(codec.encode("b."), 1, 1))
        assert generator.closed == [0]
        generator.deliver(CommittedTokens(codec.encode("late"), 0, 0))
        assert [delta.text async for deltas in arrivals for delta in deltas] == ["b"]


async def test_a_fault_in_the_text_is_raised_to_the_reader_alone(codec: TextCodec) -> None:
    generator = ManualGenerator([CommittedTokens(codec.encode("a"), 0, 0), STALL])
    arrivals = follow(generator, choices(codec, 1), Metrics(), count().__next__)
    await anext(arrivals)
    generator.deliver(CommittedTokens((-1,), 0, 0))  # no token of any vocabulary
    with pytest.raises(OverflowError):
        await anext(arrivals)
    assert generator.closed == [0]


async def test_closing_closes_sessions_and_leaves_no_task(codec: TextCodec) -> None:
    generator = ScriptedGenerator([CommittedTokens(codec.encode("a"), 0, 0), STALL], [STALL])
    deltas = follow(generator, choices(codec, 2), Metrics(), count().__next__)
    await anext(deltas)
    await deltas.aclose()
    assert sorted(generator.closed) == [0, 1]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_inter_token_time_is_measured_per_verdict(codec: TextCodec) -> None:
    metrics = Metrics()
    generator = ScriptedGenerator(
        [CommittedTokens((1,), 0, 0), CommittedTokens((1, 2), 1, 4), CommittedTokens((1,), 0, 3), Ended(Finish.LENGTH)]
    )
    (choice,) = choices(codec, 1)
    async for _ in follow(generator, [choice], metrics, count().__next__):
        pass
    assert (choice.text.first_token_s, choice.text.last_token_s) == (1, 3)
    sample = metrics.registry.get_sample_value
    assert sample("slipstream_time_to_first_token_seconds_count") == 1
    assert sample("slipstream_inter_token_seconds_count") == 2
    assert sample("slipstream_inter_token_seconds_sum") == 2


# ---------------------------------------------------------------- text options and scores


def scores_of(tokens: Sequence[int]) -> tuple[TokenScore, ...]:
    return tuple(TokenScore(-float(token), 1) for token in tokens)


def formed(codec: TextCodec, *stops: str, **form: Any) -> ChoiceText:
    options = TextOptions(**form)
    return ChoiceText(0, codec.detokenizer(), StopMatcher(stops, options.keeps_stop), options=options)


@pytest.mark.parametrize("cut", range(1, 6))
@pytest.mark.parametrize(("keeps_stop", "expected"), [(False, "ab"), (True, "abc")])
def test_the_text_of_a_stop_id_is_omitted_unless_requested(
    codec: TextCodec, cut: int, keeps_stop: bool, expected: str
) -> None:
    tokens = codec.encode("abc")
    (stop_id,) = codec.encode("c")
    choice = formed(codec, stop_ids=frozenset([stop_id]), keeps_stop=keeps_stop)
    for part in (tokens[:cut], tokens[cut:]):
        choice.extend(CommittedTokens(part, 0, 0))
    choice.end(Finish.STOP)
    assert (choice.text, choice.finish, choice.tokens) == (expected, "stop", 3)


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("keeps_stop", [False, True])
@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_text_of_several_tokens_equals_text_by_token(
    codec: TextCodec, size: int, keeps_stop: bool, finish: Finish
) -> None:
    tokens = codec.encode("añ€b.")
    ends = {"stop_ids": frozenset(tokens[-1:]), "named_stop_ids": frozenset(tokens[-1:]), "keeps_stop": keeps_stop}
    by_token, at_once = [formed(codec, **ends, by_token=splits) for splits in (True, False)]
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        committed = CommittedTokens(part, len(part) - 1, len(part), scores_of(part))
        first, second = by_token.extend(committed), at_once.extend(committed)
        assert (first and (first.text, first.tokens, first.accepted, first.scored)) == (
            second and (second.text, second.tokens, second.accepted, second.scored)
        )
    assert by_token.end(finish) == at_once.end(finish)
    assert by_token.text == at_once.text


@pytest.mark.parametrize("cut", range(1, 8))
@pytest.mark.parametrize(("keeps_stop", "expected"), [(False, "one "), (True, "one two")])
def test_a_stop_string_across_verdicts_is_omitted_unless_requested(
    codec: TextCodec, cut: int, keeps_stop: bool, expected: str
) -> None:
    tokens = codec.encode("one two three")
    choice = formed(codec, "two", keeps_stop=keeps_stop)
    for part in (tokens[:cut], tokens[cut:]):
        if choice.finish is None:
            choice.extend(CommittedTokens(part, 0, 0))
    assert (choice.text, choice.finish) == (expected, "stop")


def test_stop_strings_are_ignored_within_min_tokens(codec: TextCodec) -> None:
    choice = formed(codec, "b", min_tokens=3)
    choice.extend(CommittedTokens(codec.encode("abcabc"), 0, 0))
    assert (choice.text, choice.finish, choice.tokens) == ("abca", "stop", 5)


def test_an_echoed_prompt_comes_first_and_its_scores_begin_with_none(codec: TextCodec) -> None:
    prompt = codec.encode("bba")
    generated = codec.encode("cba")
    choice = formed(codec, "b", echoed=prompt, echoed_text="bba")
    delta = choice.extend(CommittedTokens(generated, 0, 0, scores_of(generated), scores_of(prompt[1:])))
    assert (delta.text, choice.text, choice.finish) == ("bbac", "bbac", "stop")
    assert [scored.token for scored in delta.scored] == [*prompt, *generated[:2]]
    assert delta.scored[0].score is None
    assert [scored.score for scored in delta.scored[1:]] == [*scores_of(prompt[1:]), *scores_of(generated[:2])]


def test_an_echoed_prompt_of_one_token_has_an_entry_without_a_score(codec: TextCodec) -> None:
    prompt, generated = codec.encode("b"), codec.encode("a")
    choice = formed(codec, echoed=prompt, echoed_text="b")
    delta = choice.extend(CommittedTokens(generated, 0, 0, scores_of(generated)))
    scores = (None, *scores_of(generated))
    assert [(one.token, one.score) for one in delta.scored] == list(zip(prompt + generated, scores, strict=True))


def test_an_echoed_prompt_alone_is_not_released_at_a_failure(codec: TextCodec) -> None:
    choice = formed(codec, echoed=codec.encode("hi"), echoed_text="hi")
    assert choice.flush() is None


def test_each_delta_has_the_scores_of_its_own_tokens(codec: TextCodec) -> None:
    choice = formed(codec)
    found: list[Delta] = []
    for text in ("ab", "c"):
        tokens = codec.encode(text)
        delta = choice.extend(CommittedTokens(tokens, 0, 0, scores_of(tokens)))
        assert delta is not None
        found.append(delta)
    assert [[scored.token for scored in delta.scored] for delta in found] == [
        list(codec.encode(t)) for t in ("ab", "c")
    ]
    assert choice.end(Finish.LENGTH).scored == ()
