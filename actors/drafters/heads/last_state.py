"""Drafts with heads that read one state of the target, from which the last committed token was sampled.

Such heads have no other context, so a session needs one row per round and no states of the prompt. `LastRows` stores
the rows, `LastStatePredictor` drafts, and `last_state_drafting` creates the method. `medusa.py` and `mlp_speculator.py`
define the heads.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from actors.attention.batch import never
from actors.compute.linear import Product
from actors.drafters.heads.files import folder_to_borrow_from, head_folder
from actors.drafters.heads.head_drafter import HeadDrafter, PredictedDraft, fill_positions
from actors.drafters.heads.rope import TargetShape, target_shape
from actors.drafters.model.sampling import (
    MAX_BRANCH_TOKENS,
    Calibration,
    DraftingLimits,
    DraftSampler,
    check_finite,
)
from actors.drafters.products import choose_products
from actors.drafters.registry import DraftSetup
from actors.engine.process import device_of
from actors.models.decoder import ForwardOutput
from actors.sampling.logits_processors import PROCESSOR_FACTORIES
from cluster.config import DraftPool
from cluster.config_sections import HeadOptions
from cluster.drafting.trees import TokenPath, threshold_of, worth_branching
from cluster.errors import ModelError
from protos.messages import StatesNeeded
from protos.prefix import hashes_after

MAX_KEPT_ROWS = 512  # per session; states may arrive before their verdicts


class LastRows:
    """The target's states per session and position, from the state before the last committed token on."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._rows: dict[str, dict[int, Tensor]] = {}

    def keep(self, session: str, first: int, rows: Tensor, first_needed: int) -> None:
        """Stores rows, (rows, width), at positions `first` and up; skips positions below `first_needed`."""
        by_position = self._rows.setdefault(session, {})
        for position in range(max(first, first_needed), first + len(rows)):
            by_position[position] = rows[position - first].to(self._device, self._dtype, copy=True)
        for position in sorted(by_position)[MAX_KEPT_ROWS:]:
            del by_position[position]

    def forget_before(self, session: str, first_needed: int) -> None:
        by_position = self._rows.get(session, {})
        for position in [position for position in by_position if position < first_needed]:
            del by_position[position]

    def at(self, session: str, position: int) -> Tensor | None:
        """Returns the row at a position, (width,); None if it has not arrived."""
        return self._rows.get(session, {}).get(position)

    def close(self, session: str) -> None:
        self._rows.pop(session, None)


class LastStateConfig(Protocol):
    """Resolved configuration of a head."""

    @property
    def width(self) -> int:
        """Number of predicted tokens."""
        ...

    @property
    def needs(self) -> StatesNeeded: ...

    @property
    def recurs(self) -> bool:
        """True if the head reads sampled tokens and its own states; False if it reads only the target's state."""
        ...

    def reach(self, depth: int) -> int:
        """Returns the number of tokens that the head can predict at `depth` tokens past the target's states; 0: it must
        wait.
        """
        ...

    def describe(self) -> list[str]:
        """Describes the resolved configuration, one fact per line."""
        ...


class LastStateHead(Protocol):
    """Head that predicts several tokens from one state of the target."""

    @property
    def config(self) -> LastStateConfig: ...

    @property
    def token_ids(self) -> Tensor:
        """The target's token id for each logit column, (columns,)."""
        ...

    def predict_next(self, states: Tensor, tokens: Sequence[int], depth: int) -> ForwardOutput:
        """Predicts the token after each of `tokens`, which are `depth` tokens past the target's states.

        Each token was sampled from its row of `states`, (rows, hidden), computed by the target or an earlier call.
        """
        ...


class LastStatePredictor:
    """A `StatePredictor` for a `LastStateHead`."""

    def __init__(self, head: LastStateHead, sampler: DraftSampler, rows: LastRows) -> None:
        self._head = head
        self._sampler = sampler
        self._rows = rows

    @property
    def width(self) -> int:
        return self._head.config.width

    @property
    def needs(self) -> StatesNeeded:
        return self._head.config.needs

    def reach(self, depth: int) -> int:
        return self._head.config.reach(depth)

    def exchange(self, head: LastStateHead) -> LastStateHead:
        """Replaces the head between two passes; returns the previous one. Stored states do not depend on the head."""
        used = self._head
        self._head = head
        self._sampler.exchange(head.token_ids)
        return used

    # ------------------------------------------------------------ states

    def open(self, session: str) -> None:
        self._rows.close(session)

    def begin(self, session: str, first: int) -> None:
        """Does nothing: the head reads only the latest state."""

    def states(self, session: str, first: int, rows: Tensor, length: int) -> None:
        assert rows.shape[-1] == self.needs.width, "unexpected row width"
        self._rows.keep(session, first, rows, _position(length))

    def committed(self, session: str, length: int) -> None:
        self._rows.forget_before(session, _position(length))

    def close(self, session: str) -> None:
        self._rows.close(session)

    def is_ready(self, session: str, length: int) -> bool:
        return self._rows.at(session, _position(length)) is not None

    def _state(self, draft: PredictedDraft) -> Tensor:
        """Returns the target's state, (hidden,), from which the last committed token was sampled."""
        state = self._rows.at(draft.request.session, _position(draft.request.base_len))
        assert state is not None, "is_ready was not checked"
        return state

    # ------------------------------------------------------------ blocks

    def fill(self, drafts: Sequence[PredictedDraft], interrupted: Callable[[], bool]) -> None:
        if self._head.config.recurs:
            self._recur(drafts, interrupted)
        else:
            fill_positions(drafts, self.width, self._predict_logits, self._sampler, interrupted)

    def _predict_logits(self, drafts: Sequence[PredictedDraft], counts: Sequence[int]) -> list[Tensor]:
        """Predicts each position with its own head, for all drafts that need it in one batch."""
        states = [self._state(draft) for draft in drafts]
        predictions: list[list[Tensor]] = [[] for _ in drafts]
        for depth in range(max(counts)):
            indices = [index for index, count in enumerate(counts) if count > depth]
            tokens = [drafts[index].text.tokens[-1] for index in indices]
            output = self._head.predict_next(torch.stack([states[index] for index in indices]), tokens, depth)
            for index, logits in zip(indices, output.logits, strict=True):
                predictions[index].append(logits)
        return [torch.stack(rows) for rows in predictions]

    def _recur(self, drafts: Sequence[PredictedDraft], interrupted: Callable[[], bool]) -> None:
        for draft in drafts:
            if draft.state is None:  # else, the draft continues from an outcome's state
                draft.state = self._state(draft)
        if not self._complete(drafts, interrupted):
            return
        self._complete([branch for draft in drafts for branch in self._branch_off(draft)], never)
        for draft in drafts:
            draft.end()

    def _complete(self, drafts: Sequence[PredictedDraft], interrupted: Callable[[], bool]) -> bool:
        """Completes chains, batching drafts of equal depth; returns False if interrupted."""
        while True:
            by_depth: dict[int, list[PredictedDraft]] = {}
            for draft in drafts:
                if not draft.is_complete and len(draft.drafted) < draft.longest:
                    by_depth.setdefault(draft.depth, []).append(draft)
            if not by_depth:
                return True
            if interrupted():
                return False
            for depth, together in by_depth.items():
                self._extend(together, depth)

    def _extend(self, drafts: Sequence[PredictedDraft], depth: int) -> None:
        states, tokens = zip(*[_last(draft) for draft in drafts], strict=True)
        output = self._head.predict_next(torch.stack(states), tokens, depth)
        assert output.hidden is not None, "the head returned no states"
        self._sampler.extend(
            list(zip(drafts, torch.split(output.logits, 1), torch.split(output.hidden, 1), strict=True))
        )

    def _branch_off(self, block: PredictedDraft) -> list[PredictedDraft]:
        """Starts side branches with alternatives to the block's tokens."""
        if not block.takes_trees or not block.drafted:
            return []
        paths = block.paths
        least = max(block.least_chance, threshold_of(paths, block.max_tokens))
        branches = [
            self._new_branch(block, stem, chance)
            for stem, chance in worth_branching(paths, block.tokens, least)
            if len(stem) < min(block.max_tokens, self.width)
        ]
        block.branches += branches
        return branches

    def _new_branch(self, block: PredictedDraft, stem: TokenPath, chance: float) -> PredictedDraft:
        tokens = min(MAX_BRANCH_TOKENS, block.max_tokens - len(stem), self.width - len(stem))
        return PredictedDraft(
            request=block.request,
            text=block.text,
            base_hash=hashes_after(block.base_hash, stem)[-1],
            max_tokens=tokens,
            outcome=(*block.outcome, *stem),
            chance=chance,
            stem=stem,
            state=block.drafted[len(stem) - 1].state,
            longest=tokens,
        )


def _position(length: int) -> int:
    """Returns the position of the state from which the last of `length` tokens was sampled."""
    return length - 2


def _last(draft: PredictedDraft) -> tuple[Tensor, int]:
    """Returns the draft's last token and the state from which it was sampled."""
    state, token = draft.last
    assert isinstance(state, Tensor), "a draft begins with a state"
    return state, token


log = logging.getLogger(__name__)


HeadLoader = Callable[[Path, Path, torch.dtype, torch.device, Collection[int], Product], LastStateHead]
"""Loads the head in the first folder for the target in the second. Raises ModelError if they do not match."""


def states_needed(draft: DraftPool, target: Path) -> StatesNeeded:
    """Requires only the target's final hidden state at the latest position."""
    shape = target_shape(target)
    return StatesNeeded((shape.layers,), shape.hidden, window=1)


def check_state_width(folder: Path, width: int, target: TargetShape) -> None:
    """Raises ModelError unless the head's state width equals the target's hidden size."""
    if width != target.hidden:
        raise ModelError(
            f"{folder} reads states of {width} elements, but the target's have {target.hidden}; use a draft made for"
            " this target"
        )


def last_state_drafting(
    load: HeadLoader,
    draft: DraftPool,
    setup: DraftSetup,
    options: HeadOptions,
    borrowed: Sequence[Sequence[str]] = (),
) -> HeadDrafter:
    """Creates the method of the head in `draft.model`; logs the resolved configuration.

    `borrowed` lists groups of tensor names. From each group, the first tensor in the target's checkpoint is borrowed.
    """
    device = device_of(draft.resources)
    products = choose_products(options.quantization, setup.dtype, device)
    target = folder_to_borrow_from(setup.target, borrowed)

    def loaded(folder: Path) -> LastStateHead:
        return load(folder, target, products.dtype, device, setup.target_tokens.keys(), products.product)

    head = loaded(head_folder(draft))
    log.info("\n".join(head.config.describe()))
    rows = target_shape(target).vocabulary
    limits = DraftingLimits(options.draft_probs_top_k)
    sampler = DraftSampler(
        head.token_ids, rows, limits, Calibration(), (*PROCESSOR_FACTORIES, *setup.processor_factories)
    )
    predictor = LastStatePredictor(head, sampler, LastRows(device, products.dtype))
    config = head.config  # a reference to the head would keep it after an exchange

    def prepare(folder: Path) -> Callable[[], object]:
        other = loaded(folder)
        _check_replaces(folder, other, config, torch.ones(1, config.needs.width, dtype=products.dtype, device=device))
        return partial(predictor.exchange, other)

    return HeadDrafter(predictor, sampler, prepare=prepare)


@torch.inference_mode()
def _check_replaces(folder: Path, head: LastStateHead, used: LastStateConfig, states: Tensor) -> None:
    """Raises ModelError if a head has another shape than the head in use, or computes NaN or infinite logits from
    `states`, (1, width).
    """
    if head.config != used:
        raise ModelError(
            f"{folder} cannot replace the head in use: its shape differs; train it from the head in draft.model"
        )
    for depth in range(head.config.width):
        output = head.predict_next(states, [int(head.token_ids[0])], depth)
        check_finite(output.logits, folder)
        assert output.hidden is not None, "the head returned no states"
        states = output.hidden
