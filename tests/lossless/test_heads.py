"""Heads that predict several tokens from the target's states, through the whole world: chains, trees, and ahead.

Each head knows the toy target by heart, and reads all that it knows of a text from the states that reach it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.compute.state_codec import decode_rows
from actors.methods.heads.last_state.last_rows import LastRows
from actors.methods.heads.last_state.last_state_drafting import LastStatePredictor
from actors.methods.heads.predicted_drafting import PredictedDrafting
from actors.methods.model.calibration import Calibration
from actors.methods.model.limits import DraftingLimits
from actors.methods.model.sampling import DraftSampler
from actors.models.forward_output import ForwardOutput
from protos.messages import Acceptance, Sampling
from protos.states import StatesNeeded
from tests.lossless.parts import Setting
from tests.lossless.states import LAYOUT, ReadingMethod
from tests.lossless.test_distribution import DRAFTERS, FALSE_ALARM, FEW, FEW_WORLDS, p_value
from tests.lossless.test_distribution import TARGET as FEW_TOKENS
from tests.lossless.test_lock_step import AT_ONCE, BLOCK_LEN, NEW_TOKENS, TARGET
from tests.lossless.world import ToyDrafter, World, calm, near_patience, stormy

WORLDS = 2
WIDTH = 4


@dataclass(frozen=True)
class ToyConfig:
    recurs: bool
    width: int = WIDTH
    needs: StatesNeeded = StatesNeeded((1,), LAYOUT.width)

    def reach(self, depth: int) -> int:
        return self.width if self.recurs else max(0, self.width - depth)

    def describe(self) -> list[str]:
        return []


class ByPlace:
    """As Medusa's: after the target's state of a token come, so many places on, these tokens."""

    config = ToyConfig(recurs=False)

    def __init__(self, logits: Tensor) -> None:
        self._next = (3 * logits).softmax(dim=-1)  # of each token the chances of what follows, surer than they are

    def predict_next(self, states: Tensor, tokens: Sequence[int], depth: int) -> ForwardOutput:
        after = torch.linalg.matrix_power(self._next, depth + 2)
        return ForwardOutput(after[states[:, 0].long()].log(), states)


class ByToken:
    """As an MLP speculator: the state, which the target's begins, counts the tokens taken after it."""

    config = ToyConfig(recurs=True)

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def predict_next(self, states: Tensor, tokens: Sequence[int], depth: int) -> ForwardOutput:
        if depth == 0:
            states = torch.stack((states[:, 1], torch.zeros(len(states))), dim=-1)
        assert (states[:, 1] == depth).all(), "a state is taken for another"
        return ForwardOutput(self._logits[torch.tensor(tokens)], states + torch.tensor([0.0, 1.0]))


class HeadReading(ReadingMethod):
    """Holds the states against the text, and passes them on."""

    def states(self, session: str, first: int, rows: bytes) -> None:
        super().states(session, first, rows)
        self.head.states(session, first, decode_rows(rows, LAYOUT))

    @property
    def head(self) -> PredictedDrafting:
        found: Any = self._model
        assert isinstance(found, PredictedDrafting)
        return found


class HeadWorld(World):
    """Its drafters ask a head, which may be another for every test."""

    made_of: type[ByPlace] | type[ByToken] = ByPlace

    def _new_drafter(self) -> ToyDrafter:
        drafter = super()._new_drafter()
        vocabulary = self._setting.vocabulary
        limits = DraftingLimits(top_k=vocabulary, weight_scale=self._setting.weight_scale)
        sampler = DraftSampler(torch.arange(vocabulary), vocabulary, limits, Calibration())
        rows = LastRows(torch.device("cpu"), torch.float32)
        method: Any = PredictedDrafting(
            LastStatePredictor(self.made_of(self._setting.draft_logits), sampler, rows), sampler, lambda: self._now
        )
        drafter.method = HeadReading(method)
        drafter.model = method
        return drafter


class PlacesWorld(HeadWorld):
    made_of = ByPlace


class TokensWorld(HeadWorld):
    made_of = ByToken


def worlds_of(kind: type[World], setting: Setting) -> list[World]:
    worlds = [kind(replace(setting, prompt=tuple(range(1, 8 + seed))), AT_ONCE, seed) for seed in range(WORLDS)]
    for world in worlds:
        world.run()
    return worlds


def texts_of(worlds: list[World]) -> list[tuple[int, ...]]:
    return [session.committed for world in worlds for session in world.sessions.values()]


GREEDY = Sampling(temperature=0.0)
COUPLED = Sampling(temperature=0.7)
PENALISED = Sampling(temperature=1.0, frequency_penalty=0.5)


@pytest.mark.parametrize("kind", [PlacesWorld, TokensWorld], ids=["by place", "by token"])
@pytest.mark.parametrize(
    ("sampling", "schedule"),
    [
        pytest.param(GREEDY, calm, id="greedy, calm"),
        pytest.param(GREEDY, near_patience, id="greedy, near patience"),
        pytest.param(COUPLED, calm, id="coupled, calm"),
        pytest.param(COUPLED, stormy, id="coupled, stormy"),
        pytest.param(PENALISED, calm, id="penalties, calm"),
    ],
)
def test_blocks_of_heads_decide_what_plain_decoding_does(sampling: Sampling, schedule: Any, kind: Any) -> None:
    """Trees and blocks ahead of verdicts among them, on every schedule, with a pass cut short now and then."""
    plain = Setting(TARGET, TARGET, Acceptance.COUPLED, calm, 0, NEW_TOKENS, sampling)
    setting = replace(plain, schedule=schedule, block_len=BLOCK_LEN, reads_states=True, interruption=0.1, pages=64)
    worlds = worlds_of(kind, setting)
    assert texts_of(worlds) == texts_of(worlds_of(World, plain))
    accepted = sum(session.counts.accepted for world in worlds for session in world.sessions.values())
    assert accepted > (len(texts_of(worlds)) if schedule is calm else 0), "hardly any draft stood: this showed nothing"
    assert sum(world.branches_accepted for world in worlds) > 0, "no tree stood along another path than its first"
    assert sum(world.drafting.counts["guess_hit"] for world in worlds) > 0, "no block ahead of a verdict was of use"


@pytest.mark.parametrize("kind", [PlacesWorld, TokensWorld], ids=["by place", "by token"])
@pytest.mark.parametrize(("new_tokens", "interruption"), [(4, 0.0), (5, 0.1)], ids=["whole passes", "interrupted"])
def test_under_ratio_blocks_ahead_of_heads_keep_the_distribution(
    new_tokens: int, interruption: float, kind: Any
) -> None:
    """By chi-square over all texts, with a false-alarm rate of 1e-5 a case."""
    setting = Setting(
        FEW_TOKENS,
        DRAFTERS["good"],
        Acceptance.RATIO,
        calm,
        new_tokens=new_tokens,
        prompt=(2, 1),
        interruption=interruption,
        reads_states=True,
    )
    worlds = [kind(setting, FEW, seed) for seed in range(FEW_WORLDS)]
    samples = [text for world in worlds for text in world.run()]
    assert p_value(setting, samples) > FALSE_ALARM
    hits = sum(world.drafting.counts["guess_hit"] for world in worlds)
    assert hits > len(samples) / 10, "blocks ahead were hardly used: this showed nothing"
