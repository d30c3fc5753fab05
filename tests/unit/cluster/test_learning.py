"""Tests consent, near-duplicates, scores and the decision on promotion."""

import random

import pytest

from cluster.learning import (
    Consent,
    Example,
    Manifest,
    SessionScore,
    State,
    compare,
    decide,
    is_held_out,
    may_learn,
    missing_examples,
    score,
    sketch,
)

MIN_SESSIONS = 16
MAX_LOSS = 0.03


@pytest.mark.parametrize(
    ("consent", "choice", "key_contributes", "expected"),
    [
        (Consent.ALL, None, True, True),
        (Consent.ALL, "true", True, True),
        (Consent.ALL, "false", True, False),
        (Consent.OPTED_IN, None, True, False),
        (Consent.OPTED_IN, "true", True, True),
        (Consent.OPTED_IN, "false", True, False),
        (Consent.ALL, "true", False, False),
        (Consent.OPTED_IN, "true", False, False),
    ],
)
def test_learning_consent(consent, choice, key_contributes, expected):
    assert may_learn(consent, choice, key_contributes) is expected


# ---------------------------------------------------------------- near-duplicates


def an_answer(chosen: random.Random, length: int = 64) -> list[int]:
    return [chosen.randrange(49_152) for _ in range(length)]


def test_answers_that_differ_in_a_word_share_a_band_and_others_do_not():
    """Over 200 pairs of each kind, the probability of a shared band is above 0.9 or below 1e-6."""
    chosen = random.Random(1)
    alike = different = 0
    for _ in range(200):
        answer = an_answer(chosen, 128)
        changed = [*answer]
        changed[chosen.randrange(128)] += 1
        alike += bool(set(sketch(answer)) & set(sketch(changed)))
        different += bool(set(sketch(answer)) & set(sketch(an_answer(chosen, 128))))
    assert alike > 180
    assert different == 0


def test_short_and_empty_answers_have_a_sketch():
    assert sketch([7]) == sketch([7])
    assert not set(sketch([7])) & set(sketch([8]))
    assert sketch([])


def test_a_fixed_share_is_held_out_by_content():
    chosen = random.Random(2)
    examples = [Example(tuple(an_answer(chosen, 5)), tuple(an_answer(chosen, 8))) for _ in range(2000)]
    held_out = [is_held_out(example) for example in examples]
    assert held_out == [is_held_out(example) for example in examples]
    assert 300 < sum(held_out) < 500


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("agreements", "draft_tokens", "verifies"),
    [
        ([], 4, 0),
        ([False] * 5, 4, 5),
        ([True] * 5, 4, 1),
        ([True] * 10, 4, 2),
        ([True, True, False, True, True, True], 4, 2),
        ([True, True, True, True, True, False], 2, 2),
    ],
)
def test_verifies_of_an_answer(agreements, draft_tokens, verifies):
    assert score(agreements, draft_tokens) == SessionScore(len(agreements), sum(agreements), verifies)


def sessions(verifies: list[int], tokens: int = 64, agreed: int = 40) -> list[SessionScore]:
    return [SessionScore(tokens, agreed, each) for each in verifies]


def test_the_interval_is_that_of_the_ratio():
    """At a true ratio of 1.25, 90 % to 99 % of 400 experiments have a 95 % interval that contains it."""
    chosen = random.Random(3)
    covered = 0
    for _ in range(400):
        before = [chosen.randint(20, 40) for _ in range(40)]
        after = [round(0.8 * each + chosen.uniform(-4, 4)) for each in before]
        comparison = compare(sessions(before), sessions(after))
        covered += comparison.low <= 1.25 <= comparison.high
    assert 360 <= covered <= 396


def test_a_better_candidate_is_promoted():
    chosen = random.Random(4)
    before = [chosen.randint(20, 40) for _ in range(40)]
    recent = compare(sessions(before), sessions([each - 5 for each in before], agreed=50))
    decision = decide(recent, None, MAX_LOSS, MIN_SESSIONS)
    assert decision.is_better
    assert decision.reason.startswith("tokens per verify")


def test_noise_promotes_nothing():
    """Equally good candidates are promoted in at most 2.5 % of trials; the test allows 5 %."""
    chosen = random.Random(5)
    promoted = 0
    for _ in range(400):
        before = [chosen.randint(20, 40) for _ in range(40)]
        after = [each + chosen.choice((-3, -2, -1, 0, 1, 2, 3)) for each in before]
        promoted += decide(compare(sessions(before), sessions(after)), None, MAX_LOSS, MIN_SESSIONS).is_better
    assert promoted <= 20


def test_a_candidate_that_forgets_is_rejected():
    recent = compare(sessions([30, 40] * 20), sessions([20, 30] * 20))
    before = sessions([30] * 20, agreed=40)
    for agreed, expected in ((39, True), (30, False)):
        general = compare(before, sessions([30] * 20, agreed=agreed))
        decision = decide(recent, general, MAX_LOSS, MIN_SESSIONS)
        assert decision.is_better is expected
        assert ("general examples" in decision.reason) is not expected


def test_too_few_sessions_promote_nothing():
    recent = compare(sessions([30, 40] * 5), sessions([20, 30] * 5))
    assert "16 needed" in decide(recent, None, MAX_LOSS, MIN_SESSIONS).reason
    assert not decide(compare([], []), None, MAX_LOSS, 1).is_better
    assert not decide(compare(sessions([30]), sessions([20])), None, MAX_LOSS, 1).is_better
    unscored = sessions([0] * 40, tokens=0, agreed=0)
    recent = compare([*sessions([30, 40]), *unscored], [*sessions([20, 27]), *unscored])
    assert decide(recent, None, MAX_LOSS, MIN_SESSIONS).reason == "2 held-out sessions, 16 needed"


def test_a_training_needs_new_examples_and_held_out_ones():
    assert missing_examples(10, held_out=100, min_examples=30, min_sessions=4) == 20
    assert missing_examples(30, held_out=8, min_examples=30, min_sessions=4) == 0
    assert missing_examples(30, held_out=6, min_examples=30, min_sessions=4) == 10
    assert missing_examples(0, held_out=0.0, min_examples=200, min_sessions=16) == 200
    assert missing_examples(0, held_out=0.0, min_examples=50, min_sessions=16) == 160


def test_figures_that_are_no_numbers_promote_nothing():
    recent = compare(sessions([30, 40] * 20), sessions([20, 30] * 20))
    broken = recent.model_copy(update={"low": float("nan")})
    assert not decide(broken, None, MAX_LOSS, MIN_SESSIONS).is_better
    general = recent.model_copy(update={"after": recent.after.model_copy(update={"agreement": float("nan")})})
    assert not decide(recent, general, MAX_LOSS, MIN_SESSIONS).is_better


def test_a_comparison_of_too_few_sessions_survives_its_record():
    comparison = compare(sessions([30]), sessions([20]))
    manifest = Manifest(
        version=1,
        parent=0,
        created=0.0,
        state=State.REJECTED,
        reason="too few",
        method="draft_model",
        target="target",
        examples=1,
        tokens=64,
        seconds=1.0,
        recent=comparison,
    )
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
