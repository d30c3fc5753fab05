"""A target with a recurrent layer commits the text of non-speculative decoding.

Its state after a rejected draft is computed from an earlier state, also in pages that sessions share, and after
preemption. `RecurrentRunner` fails on a state of another text.
"""

import functools

import pytest

from protos.messages import Acceptance, Sampling
from tests.lossless.parts import Schedule, Setting
from tests.lossless.test_reference_loop import DRAFT, SCHEDULES, TARGET
from tests.lossless.world import World, accepted, run_worlds, texts

BLOCK_LEN = 5
NEW_TOKENS = 30
AT_ONCE = 6
PROMPTS = [(1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11)]  # sessions of a world share the pages of their prompt
ENOUGH_PAGES = 4096
FEW_PAGES = 48  # less than half of what all sessions need


def worlds(schedule: Schedule, sampling: Sampling, block_len: int, pages: int) -> list[World]:
    setting = Setting(
        TARGET,
        DRAFT,
        Acceptance.COUPLED,
        schedule,
        block_len,
        NEW_TOKENS,
        sampling,
        pages=pages,
        has_recurrent_target=True,
    )
    return run_worlds(setting, AT_ONCE, PROMPTS)


@functools.cache
def without_drafts(sampling: Sampling) -> list[tuple[int, ...]]:
    return texts(worlds(SCHEDULES[0], sampling, 0, ENOUGH_PAGES))


@pytest.mark.parametrize("pages", [ENOUGH_PAGES, FEW_PAGES], ids=["enough pages", "few pages"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.__name__)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rolls_back_exactly(schedule: Schedule, temperature: float, pages: int) -> None:
    sampling = Sampling(temperature=temperature)
    found = worlds(schedule, sampling, BLOCK_LEN, pages)
    assert texts(found) == without_drafts(sampling)
    assert accepted(found) > 0
    drafted = sum(len(row.draft.tokens) for world in found for step in world.steps for row in step)
    assert accepted(found) < drafted, "no draft was rejected"
