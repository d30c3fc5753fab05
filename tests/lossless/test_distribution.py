"""The committed text follows the target's distribution exactly, for every drafter and schedule.

Under rejection sampling, chi-square tests cover all continuations of a few tokens. Each test has a false-alarm rate of
1e-5, and seeds are fixed, so a failure is a bug or, after one in 100 000 changes of seeds, chance. Under Gumbel
coupling, the text equals that of non-speculative decoding, which follows the distribution. Equality detects a single
wrong token, so it needs fewer sessions.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from protos.messages import Acceptance, Sampling
from tests.lossless.parts import EOS, Schedule, Setting
from tests.lossless.world import World, calm, lossy_delays, near_patience, only_with_eos_in_time

VOCABULARY = 4
SESSIONS = 1000
FALSE_ALARM = 1e-5
EQUAL_SESSIONS = 300  # for equality with non-speculative texts
FEW = 8  # sessions per world, and number of worlds; `tests/exhaustive` has more
FEW_WORLDS = 40
EQUAL_WORLDS = 15
TARGET = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(7)) * 1.5


def eos_heavy() -> Tensor:
    logits = torch.zeros(VOCABULARY, VOCABULARY)
    logits[:, EOS] = 3.0
    return logits


DRAFTERS = {
    "good": TARGET + 0.3 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(8)),
    "bad": torch.zeros(VOCABULARY, VOCABULARY),
    "adversarial": -3 * TARGET,
    "eos_heavy": eos_heavy(),
}


def exact_distribution(setting: Setting) -> dict[tuple[int, ...], float]:
    """Returns the probability of each non-speculative continuation, up to EOS or the length limit."""
    probs = torch.softmax(setting.target_logits.double(), dim=-1)
    exact: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=setting.new_tokens):
        end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        probability = 1.0
        last = setting.prompt[-1]
        for token in tokens[:end]:
            probability *= float(probs[last, token])
            last = token
        exact[tokens[:end]] = probability
    return exact


def p_value(setting: Setting, samples: list[tuple[int, ...]]) -> float:
    return p_value_of(exact_distribution(setting), samples)


def p_value_of(exact: Mapping[tuple[int, ...], float], samples: list[tuple[int, ...]]) -> float:
    """Returns the p-value of the samples under the exact probability of each text."""
    assert set(samples) <= exact.keys(), "a continuation that plain decoding cannot give"
    seen = Counter(samples)
    # Rare continuations share a cell, so that every expected count is at least 5.
    cells: list[tuple[float, int]] = []
    rare_expected = 0.0
    rare_seen = 0
    for tokens, probability in sorted(exact.items(), key=lambda text: text[1]):
        expected = probability * len(samples)
        if expected < 5 or 0 < rare_expected < 5:
            rare_expected += expected
            rare_seen += seen[tokens]
        else:
            cells.append((expected, seen[tokens]))
    if rare_expected:
        cells.append((rare_expected, rare_seen))
    elif rare_seen:
        return 0.0  # an impossible text occurred
    return float(chisquare([count for _, count in cells], [expected for expected, _ in cells]).pvalue)


@pytest.mark.parametrize(
    ("probabilities", "counts", "is_likely"),
    [
        pytest.param((0.7, 0.3), (69, 31), True, id="no text is rare"),
        pytest.param((0.7, 0.3), (20, 80), False, id="no text is rare, and another distribution"),
        pytest.param((0.7, 0.28, 0.01, 0.01), (70, 28, 1, 1), True, id="the rare ones share a cell with the next"),
        pytest.param((0.9, 0.07, 0.03), (50, 47, 3), False, id="a rare one hides nothing"),
        pytest.param((0.7, 0.3, 0.0), (69, 30, 1), False, id="what cannot be"),
    ],
)
def test_the_p_value_detects_another_distribution(probabilities, counts, is_likely):
    exact = {(token,): probability for token, probability in enumerate(probabilities)}
    samples = [(token,) for token, count in enumerate(counts) for _ in range(count)]
    p = p_value_of(exact, samples)
    assert 0.0 <= p <= 1.0
    assert (p > 0.1) == is_likely
    assert (p < FALSE_ALARM) != is_likely


def plainly(new_tokens: int) -> Setting:
    return Setting(TARGET, TARGET, Acceptance.COUPLED, calm, draft_tokens=0, new_tokens=new_tokens)


@functools.cache
def plain_texts(new_tokens: int, sessions: int, seed: int) -> list[tuple[int, ...]]:
    """Returns the non-speculative texts of a world's sessions."""
    return World(plainly(new_tokens), sessions, seed).run()


@pytest.mark.parametrize("new_tokens", [3, 6])
def test_non_speculative_decoding_has_the_targets_distribution(new_tokens):
    assert p_value(plainly(new_tokens), plain_texts(new_tokens, SESSIONS, seed=11)) > FALSE_ALARM


@pytest.mark.parametrize("schedule", [calm, lossy_delays, near_patience], ids=lambda s: s.__name__)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("acceptance", list(Acceptance), ids=lambda a: a.name.lower())
def test_speculation_keeps_the_joint_distribution(acceptance, drafter, schedule):
    setting = Setting(TARGET, DRAFTERS[drafter], acceptance, schedule)
    sessions = SESSIONS if acceptance is Acceptance.REJECTION else EQUAL_SESSIONS
    world = World(setting, sessions, seed=11)
    samples = world.run()
    if acceptance is Acceptance.REJECTION:
        assert p_value(setting, samples) > FALSE_ALARM
    else:
        assert samples == plain_texts(setting.new_tokens, sessions, seed=11)
    drafted = world.drafted
    assert drafted > sessions / 5, "too few drafts, so this proves nothing"


@pytest.mark.parametrize("weight_scale", [2, 3])
def test_a_drafter_draws_from_the_rounded_probabilities_that_it_sends(weight_scale):
    """Rounding nearly doubles the probability of all but the likeliest token, and the target equals the rounded draft.

    The target therefore accepts whole blocks, and the text reveals the distribution of the draft.
    """
    likeliest = torch.eye(VOCABULARY).roll(1, dims=1)
    sent = (likeliest * weight_scale).clamp_min(1.0).log()
    drafted = (likeliest * weight_scale).clamp_min(0.55).log()
    setting = Setting(sent, drafted, Acceptance.REJECTION, calm, weight_scale=weight_scale)
    world = World(setting, SESSIONS, seed=14)
    assert p_value(setting, world.run()) > FALSE_ALARM
    assert world.accepted > SESSIONS / 2


LOOKAHEAD_VARIANTS = (
    pytest.mark.parametrize(
        "several", [{}, {"width": 2}, {"recurrent": 2}], ids=["one at a time", "two by masks", "two by a head"]
    ),
    pytest.mark.parametrize("pages", [4096, 8], ids=["pages for all", "preemption"]),
    pytest.mark.parametrize("schedule", [calm, lossy_delays], ids=lambda s: s.__name__),
)


def in_all_ways(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrizes a test of `drafting_ahead` with all parameters."""
    for mark in LOOKAHEAD_VARIANTS:
        test = mark(test)
    return test


def drafted_ahead(setting: Setting, seeds: range) -> list[tuple[int, ...]]:
    """Returns the texts of a world for each seed; asserts that lookahead blocks were used."""
    samples: list[tuple[int, ...]] = []
    counts: Counter[str] = Counter()
    for seed in seeds:
        world = World(setting, FEW, seed)
        samples += world.run()
        counts.update(world.drafting.counts, preempted=world.verification.admission.preempted)
    assert counts["guess_hit"] > len(samples) / 30, "too few guesses were used, so this proves nothing"
    assert counts["guesses"] > 2 * (counts["guess_hit"] + counts["guess_miss"]), "several outcomes for each verdict"
    assert (counts["preempted"] > len(seeds) / 10) == (setting.pages < 4096)
    return samples


def drafting_ahead(acceptance: Acceptance, schedule: Schedule, pages: int, several: dict[str, int]) -> Setting:
    """Configures random interruptions, and preemption if the target has few pages.

    A draft with several tokens per forward pass may predict another token at a position than a separate forward pass;
    the result depends on the start of the block.
    """
    return Setting(
        TARGET,
        DRAFTERS["good"],
        acceptance,
        schedule,
        new_tokens=6,
        ahead=2,
        interruption=0.1,
        pages=pages,
        **several,
    )


@in_all_ways
@pytest.mark.parametrize("acceptance", list(Acceptance), ids=lambda a: a.name.lower())
def test_drafting_ahead_for_several_outcomes_keeps_the_distribution(acceptance, schedule, pages, several):
    setting = drafting_ahead(acceptance, schedule, pages, several)
    if acceptance is Acceptance.REJECTION:
        assert p_value(setting, drafted_ahead(setting, range(FEW_WORLDS))) > FALSE_ALARM
    else:
        seeds = range(EQUAL_WORLDS)
        plain = [text for seed in seeds for text in plain_texts(setting.new_tokens, FEW, seed)]
        assert drafted_ahead(setting, seeds) == plain


def with_best_two_swapped(logits: Tensor) -> Tensor:
    """Returns the logits of a drafter whose second choice is the target's first."""
    best = logits.topk(2, dim=-1)
    return logits.scatter(-1, best.indices, best.values.flip(-1))


def test_a_schedule_that_depends_on_tokens_breaks_rejection_sampling():
    """This control shows that the other tests can fail."""
    setting = Setting(TARGET, TARGET, Acceptance.REJECTION, only_with_eos_in_time)
    assert p_value(setting, World(setting, SESSIONS, seed=12).run()) < FALSE_ALARM


def test_the_same_schedule_does_not_break_gumbel_coupling():
    setting = Setting(TARGET, TARGET, Acceptance.COUPLED, only_with_eos_in_time)
    samples = World(setting, EQUAL_SESSIONS, seed=12).run()
    assert samples == plain_texts(setting.new_tokens, EQUAL_SESSIONS, seed=12)


@pytest.mark.parametrize("acceptance", list(Acceptance), ids=lambda a: a.name.lower())
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=0.7)], ids=["greedy", "temperature 0.7"]
)
def test_coupled_and_greedy_texts_do_not_depend_on_drafter_schedule_or_draft_length(acceptance, sampling):
    """The text depends only on prefix, parameters and seed."""
    if acceptance is Acceptance.REJECTION and not sampling.greedy:
        pytest.skip("sampled text may depend on the drafter; only its distribution is fixed")

    branches: list[int] = []

    def outputs(drafter: Tensor, schedule, draft_tokens: int) -> list[tuple[int, ...]]:
        setting = Setting(TARGET, drafter, acceptance, schedule, draft_tokens, new_tokens=12, sampling=sampling)
        world = World(setting, 50, seed=13)
        found = world.run()
        branches.append(world.branches_accepted)
        return found

    plain = outputs(TARGET, calm, draft_tokens=0)
    for name, schedule, draft_tokens in [
        ("good", calm, 5),
        ("good", lossy_delays, 3),
        ("adversarial", near_patience, 2),
    ]:
        assert outputs(DRAFTERS[name], schedule, draft_tokens) == plain
    for schedule in (calm, lossy_delays):
        assert outputs(with_best_two_swapped(TARGET), schedule, 3) == plain
    assert sum(branches[-2:]) > 5, "trees hardly ever mattered"
