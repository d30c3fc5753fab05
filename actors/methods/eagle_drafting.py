"""Drafting with an EAGLE head: a draft model that reads the target's states beside the tokens."""

import time
from collections.abc import Callable

from actors.attention import AttentionBackend
from actors.methods.draft_model import DraftModel
from actors.methods.heads.eagle.eagle_loading import EagleHead
from actors.methods.heads.eagle.eagle_runner import EagleRunner
from actors.methods.model.calibration import Calibration
from actors.methods.model.draft_cache import DraftCache
from actors.methods.model.limits import DraftingLimits
from actors.methods.model.pard import ONE_AT_A_TIME, MaskTokens
from actors.methods.model.state_feed import StateFeed

UNFED = 1  # a token is fed with the state before it, and there is none before the first


def eagle_draft_model(
    head: EagleHead,
    pages: int,
    page_size: int,
    limits: DraftingLimits,
    max_draft_tokens: int,
    clock: Callable[[], float] = time.monotonic,
    calibration: Calibration | None = None,
    attention: AttentionBackend | None = None,
) -> DraftModel:
    """A method over so many pages; `attention` by default as `choose_attention` has it.

    A head that predicts several tokens in one forward predicts `max_draft_tokens`.
    """
    runner = EagleRunner(head, pages, page_size, attention)
    feed = StateFeed(head.config.needs, runner.project, head.config.max_positions, runner.mask_state)
    token = head.config.mask_token
    masks = ONE_AT_A_TIME if token is None else MaskTokens(token, max_draft_tokens)
    cache = DraftCache(pages, page_size, UNFED)
    return DraftModel(runner, head.token_ids, cache, limits, clock, masks=masks, calibration=calibration, feed=feed)
