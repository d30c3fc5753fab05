"""After a weight exchange, open sessions continue without any results of the earlier weights."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.drafters.lookup.hybrid import hybrid
from actors.drafters.lookup.ngram import NgramDraft
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel, DraftWeights
from actors.drafters.model.forwards import MaskTokens
from actors.drafters.model.sampling import Calibration, Candidates, DraftingLimits, DraftKind
from cluster.drafting.method import ExchangesWeights
from cluster.errors import ModelError
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Shape
from tests.unit.actors.drafters.drafting import (
    LOGITS,
    PAGE_SIZE,
    VOCABULARY,
    PrefixRunner,
    SpyRunner,
    WantedBlock,
    a_method,
    never,
    propose,
    wanted_block,
)
from tests.unit.cluster.samples import GREEDY

OTHER = LOGITS.flip(1)
IDS = torch.arange(VOCABULARY)
TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def ahead_of(want: WantedBlock, tree: DraftTree) -> WantedBlock:
    return replace(want, unverified=tree)


def other_weights(logits: Tensor = OTHER) -> DraftWeights:
    return DraftWeights(SpyRunner(logits), IDS)


@pytest.mark.parametrize("acceptance", Acceptance)
@pytest.mark.parametrize("shape", Shape)
def test_an_exchanged_method_drafts_as_a_new_one(acceptance: Acceptance, shape: Shape) -> None:
    """The exchange happens in the middle of a text, between regular and lookahead blocks."""
    runner = PrefixRunner(scale=4.0)
    method = a_method(SpyRunner())
    new = a_method(PrefixRunner(scale=4.0))
    want = wanted_block(TEXT, acceptance=acceptance)
    (block,) = propose(method, [want], never)
    propose(method, [ahead_of(want, block.tree)], never)
    method.exchange(DraftWeights(runner, IDS))
    for one in (want, ahead_of(want, block.tree)):
        assert propose(method, [one], never) == propose(new, [one], never)
    method.close(["s"])
    assert method.is_idle


def test_open_sessions_read_their_texts_again_from_the_start() -> None:
    before = SpyRunner()
    method = a_method(before)
    propose(method, [wanted_block(TEXT)], never)
    after = SpyRunner(OTHER)
    method.exchange(DraftWeights(after, IDS))
    assert not after.fed, "an exchange computes nothing"
    fed = len(before.fed)
    propose(method, [wanted_block(TEXT)], never)
    assert (after.fed[0][0].start, after.fed[0][0].tokens) == (0, TEXT)
    assert len(before.fed) == fed


def test_prefixes_that_the_earlier_weights_computed_are_not_shared() -> None:
    method = a_method(SpyRunner())
    propose(method, [wanted_block(TEXT, session="a")], never)
    propose(method, [wanted_block(TEXT, session="b")], never)
    after = SpyRunner(OTHER)
    method.exchange(DraftWeights(after, IDS))
    propose(method, [wanted_block(TEXT, session="c")], never)
    assert after.fed[0][0].start == 0
    fed = len(after.fed)
    propose(method, [wanted_block(TEXT, session="d")], never)
    assert after.fed[fed][0].start == 2 * PAGE_SIZE, "those of the new weights are"


def test_all_pages_are_free_after_an_exchange() -> None:
    method = a_method(SpyRunner(), pages=3)
    propose(method, [wanted_block(TEXT)], never)
    after = SpyRunner(OTHER)
    method.exchange(DraftWeights(after, IDS))
    (proposal,) = propose(method, [wanted_block(TEXT[::-1], session="other")], never)
    assert len(proposal.tokens) == 3
    method.close(["s", "other"])
    assert method.is_idle


def test_other_columns_of_the_logits_are_other_tokens() -> None:
    method = a_method(SpyRunner())
    propose(method, [wanted_block((1,))], never)
    method.exchange(DraftWeights(SpyRunner(LOGITS[:, :1]), torch.tensor([7])))
    (proposal,) = propose(method, [wanted_block((1,))], never)
    assert proposal.tokens == (7, 7, 7)


def test_the_calibration_adapts_as_quickly_as_a_new_one() -> None:
    calibration = Calibration()
    method = DraftModel(SpyRunner(), IDS, DraftCache(64, PAGE_SIZE), DraftingLimits(4), calibration=calibration)
    method.open(wanted_block((1,)).open)
    text = (1,)
    for token in (3, 4, 5):
        propose(method, [wanted_block(text)], never)
        method.committed("s", (token,))
        text += (token,)
    kind = DraftKind.of(GREEDY, is_consecutive_prediction=False)
    candidates = Candidates(np.arange(3), np.log([0.5, 0.3, 0.1]), np.zeros(3), math.log(0.1))
    unchanged = deepcopy(calibration)
    before = calibration.chances(kind, candidates)
    assert before.tolist() != Calibration().chances(kind, candidates).tolist(), "it has learned"
    method.exchange(other_weights())
    assert calibration.chances(kind, candidates).tolist() == before.tolist()
    steps = []
    for each in (calibration, unchanged):
        each.note("other", (1, ()), kind, candidates)
        each.committed("other", [0, 2])
        steps.append(np.abs(each.chances(kind, candidates) - before).sum())
    assert steps[0] > steps[1]


# ---------------------------------------------------------------- preparing


def exchanging(load: Callable[[Path], DraftWeights]) -> DraftModel:
    return DraftModel(SpyRunner(), IDS, DraftCache(64, PAGE_SIZE), DraftingLimits(4), load=load)


def test_prepared_weights_take_over_on_request() -> None:
    method = exchanging(lambda folder: other_weights())
    (before,) = propose(method, [wanted_block((1,))], never)
    exchange = method.prepare_weights(Path("0001"))
    assert propose(method, [wanted_block((1,))], never) == [before]
    earlier = exchange()
    assert isinstance(earlier, DraftWeights)
    assert propose(method, [wanted_block((1,))], never) == propose(
        a_method(SpyRunner(OTHER)), [wanted_block((1,))], never
    )


def wider(folder: Path) -> DraftWeights:
    return DraftWeights(SpyRunner(), IDS, MaskTokens(0, 2))


def larger(folder: Path) -> DraftWeights:
    return DraftWeights(SpyRunner(torch.zeros(VOCABULARY + 1, VOCABULARY + 1)), IDS)


@pytest.mark.parametrize(
    ("load", "why"),
    [(wider, r"0001 .* it has 2 tokens per forward, not 1"), (larger, "11 vocabulary rows, not 10")],
)
def test_weights_of_another_shape_are_refused(load: Callable[[Path], DraftWeights], why: str) -> None:
    method = exchanging(load)
    (before,) = propose(method, [wanted_block((1,))], never)
    with pytest.raises(ModelError, match=why):
        method.prepare_weights(Path("0001"))
    assert propose(method, [wanted_block((1,))], never) == [before]


def test_a_model_without_a_checkpoint_of_its_own_cannot_be_replaced() -> None:
    with pytest.raises(ModelError, match="0001 cannot replace the draft in use"):
        a_method(SpyRunner()).prepare_weights(Path("0001"))


def test_a_hybrid_method_exchanges_the_weights_of_its_model() -> None:
    method = hybrid(NgramDraft(3, 1), exchanging(lambda folder: other_weights()))
    assert isinstance(method, ExchangesWeights)
    propose(method, [wanted_block((1,))], never)
    method.prepare_weights(Path("0001"))()
    assert propose(method, [wanted_block((1,))], never)[0].tokens[0] == int(OTHER[1].argmax())
    without = hybrid(NgramDraft(3, 1), NgramDraft(3, 1))
    with pytest.raises(ModelError, match="weights cannot be exchanged"):
        without.prepare_weights(Path("0001"))
