"""Hidden states may arrive late, twice, out of order or never, while all other messages arrive in time.

These tests separate states from their verdict's frame, so states may arrive long after the verdict or be lost alone.
The text remains that of non-speculative decoding, and every block uses the right states: `ReadingMethod` and the heads
fail on a missing, repeated or foreign state.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from cluster.envelope import Send
from cluster.reference_loop import ROUTER
from protos.messages import Acceptance, Sampling, States, Verdict
from tests.lossless.heads import EagleWorld, PlacesWorld, TokensWorld
from tests.lossless.parts import Setting
from tests.lossless.test_reference_loop import AT_ONCE, BLOCK_LEN, NEW_TOKENS, TARGET
from tests.lossless.world import HOP_S, STEP_S, World, accepted, calm

WORLDS = 2
IN_TIME_S = HOP_S / 2  # shortly before the verdict with their tokens
GREEDY = Sampling(temperature=0.0)
COUPLED = Sampling(temperature=0.7)


@dataclass(frozen=True)
class StatesSchedule:
    """Delivery of states; `events` lists exactly the events that must occur."""

    delays: Callable[[random.Random], list[float]]  # delay of each copy of a message
    events: frozenset[str]
    keeps_order: bool = False  # whether messages of a session keep their order, as on a stream


def _late(rng: random.Random) -> list[float]:
    return [rng.uniform(1, 4) * STEP_S if rng.random() < 0.2 else IN_TIME_S]


def _duplicated(rng: random.Random) -> list[float]:
    return [IN_TIME_S, IN_TIME_S + rng.uniform(0, 4) * STEP_S]


def _out_of_order(rng: random.Random) -> list[float]:
    return [rng.choice((IN_TIME_S, rng.uniform(0, 4) * STEP_S))]


def _sometimes_lost(rng: random.Random) -> list[float]:
    return [IN_TIME_S] if rng.random() < 0.7 else []


LATE = StatesSchedule(_late, frozenset({"late"}), keeps_order=True)
DUPLICATED = StatesSchedule(_duplicated, frozenset({"doubled"}))
OUT_OF_ORDER = StatesSchedule(_out_of_order, frozenset({"late", "overtaken"}))
SOMETIMES_LOST = StatesSchedule(_sometimes_lost, frozenset({"lost"}))
NEVER = StatesSchedule(lambda rng: [], frozenset({"lost"}))


class ScheduledWorld(World):
    """World with a separate delivery of states, which counts their outcomes."""

    def __init__(self, way: StatesSchedule, setting: Setting, sessions: int, seed: int) -> None:
        self._way = way
        self._decided: Counter[str] = Counter()  # verdicts sent to the drafter, by session
        self._latest: dict[str, float] = {}  # latest arrival time, by session
        self._arrived: dict[str, list[int]] = {}  # numbers of arrived messages, by session
        self.sent = 0
        self.sent_by_way: Counter[str] = Counter()
        self.became: Counter[str] = Counter()
        super().__init__(setting, sessions, seed)

    def run(self) -> list[tuple[int, ...]]:
        texts = super().run()
        self.became["lost"] = self.sent - sum(len(set(numbers)) for numbers in self._arrived.values())
        return texts

    def _route(self, sender: str, sends: list[Send]) -> None:
        self._decided.update(to.session for peer, to in sends if isinstance(to, Verdict) and peer != ROUTER)
        super()._route(sender, [send for send in sends if not isinstance(send[1], States)])
        for receiver, message in sends:
            if isinstance(message, States):
                self._send_states(sender, receiver, message)

    def _send_states(self, sender: str, receiver: str, states: States) -> None:
        self.sent += 1
        self.sent_by_way["verdict" if receiver in self.drafters else "apart"] += 1
        number = self.sent
        decided = self._decided[states.session]

        def arrive() -> None:
            self._note(states.session, number, decided)
            self._deliver(receiver, sender, [states])

        for delay in self._way.delays(self._rng):
            self._at(self._arrival(states.session, delay), arrive)

    def _arrival(self, session: str, delay: float) -> float:
        arrival = self._now + delay
        if self._way.keeps_order:
            arrival = max(arrival, self._latest.get(session, 0.0))
            self._latest[session] = arrival
        return arrival

    def _note(self, session: str, number: int, decided: int) -> None:
        before = self._arrived.setdefault(session, [])
        if number in before:
            self.became["doubled"] += 1
        else:
            self.became["late"] += self._decided[session] > decided  # a later step ended before they arrived
            self.became["overtaken"] += bool(before) and number < max(before)
        before.append(number)


class ScheduledReadingWorld(ScheduledWorld):
    """Variant with `ReadingMethod`, which drafts like the toy target."""


class ScheduledPlacesWorld(ScheduledWorld, PlacesWorld):
    """Variant with a Medusa head."""


class ScheduledTokensWorld(ScheduledWorld, TokensWorld):
    """Variant with an MLPSpeculator head."""


class ScheduledEagleWorld(ScheduledWorld, EagleWorld):
    """Variant with an EAGLE head."""


def settings(setting: Setting) -> list[Setting]:
    """Returns settings with prompts that end within pages and at page boundaries."""
    return [replace(setting, prompt=tuple(range(1, 8 + seed))) for seed in range(WORLDS)]


@functools.cache
def plain_texts(sampling: Sampling) -> list[tuple[int, ...]]:
    setting = Setting(TARGET, TARGET, Acceptance.COUPLED, calm, 0, NEW_TOKENS, sampling)
    return [text for seed, each in enumerate(settings(setting)) for text in World(each, AT_ONCE, seed).run()]


EACH_KIND = pytest.mark.parametrize(
    "kind",
    [ScheduledReadingWorld, ScheduledPlacesWorld, ScheduledTokensWorld, ScheduledEagleWorld],
    ids=["reading method", "by place", "by token", "beside tokens"],
)
EACH_SAMPLING = pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "temperature 0.7"])
KEPT_OR_NOT = pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])


def run_on(
    way: StatesSchedule, kind: type[ScheduledWorld], sampling: Sampling, keeps: bool
) -> Sequence[ScheduledWorld]:
    """Runs worlds; asserts correct texts, and exactly the expected events."""
    plain = Setting(TARGET, TARGET, Acceptance.COUPLED, calm, 0, NEW_TOKENS, sampling)
    setting = replace(plain, draft_tokens=BLOCK_LEN, reads_states=True, keeps_states=keeps)
    worlds = [kind(way, each, AT_ONCE, seed) for seed, each in enumerate(settings(setting))]
    assert [text for world in worlds for text in world.run()] == plain_texts(sampling)
    became = sum((world.became for world in worlds), Counter[str]())
    assert {what for what, count in became.items() if count} == way.events, became
    return worlds


@EACH_KIND
@EACH_SAMPLING
@KEPT_OR_NOT
@pytest.mark.parametrize(
    ("way", "least"),
    [
        pytest.param(LATE, 0.05, id="late"),
        pytest.param(DUPLICATED, 1.0, id="twice"),
        pytest.param(OUT_OF_ORDER, 0.05, id="out of order"),
        pytest.param(SOMETIMES_LOST, 0.2, id="now and then never"),
    ],
)
def test_states_that_arrive_badly_change_no_token(
    way: StatesSchedule, least: float, keeps: bool, sampling: Sampling, kind: type[ScheduledWorld]
) -> None:
    """`least` is the minimum share of affected messages with states."""
    worlds = run_on(way, kind, sampling, keeps)
    sent = sum(world.sent for world in worlds)
    for what in way.events:
        assert sum(world.became[what] for world in worlds) >= least * sent, f"hardly any was {what}"
    assert all(world.sent_by_way["verdict"] and world.sent_by_way["apart"] for world in worlds), "one way had none"
    assert accepted(worlds) > AT_ONCE * WORLDS, "too few drafts, so this proves nothing"


@EACH_KIND
@EACH_SAMPLING
@KEPT_OR_NOT
def test_without_states_nothing_is_drafted_and_no_token_changes(
    keeps: bool, sampling: Sampling, kind: type[ScheduledWorld]
) -> None:
    worlds = run_on(NEVER, kind, sampling, keeps)
    for world in worlds:
        assert world.became["lost"] == world.sent > 0
        assert world.drafted == 0
