"""Capture, encoding and storage of the target's hidden states for draft heads.

States are stored either in pages parallel to the KV cache, or only for the latest forward. With pages, all sessions
that share KV pages also share their states. This covers sessions with a common prefix, preempted sessions, and sessions
that a drafter takes over midway.

Rows are encoded in bfloat16, or in 8 bits with one scale per token. The scale is max(amax / 448, 1e-12), where amax is
taken over all layers of a token, as in the stores of vLLM and speculators. Both report equal acceptance rates with 8
and 16 bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.compute.kv_cache import to_device
from cluster.page_allocator import PageCopy, SlotMove
from protos.messages import SCALE_BYTES, StateDtype, StatesFormat


class StateStore(Protocol):
    """Stores encoded rows by KV-cache slot."""

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Writes all rows of one forward, (n, row bytes), to slots, (n,)."""
        ...

    def read(self, slots: Sequence[int]) -> bytes:
        """Returns the concatenated rows of these slots."""
        ...

    def move(self, moves: Sequence[SlotMove]) -> None:
        """Moves rows together with the slots of the KV cache, before the forward."""
        ...

    def copy(self, copies: Sequence[PageCopy]) -> None: ...


class LatestStates:
    """A `StateStore` that holds only the latest forward's rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: Tensor = torch.empty(0, dtype=torch.long)
        self._rows = torch.empty((0, 0), dtype=torch.uint8)
        self._index: dict[int, int] = {}  # row index by slot; built at the first read

    def write(self, slots: Tensor, rows: Tensor) -> None:
        self._slots = slots
        self._rows = rows
        self._index = {}

    def read(self, slots: Sequence[int]) -> bytes:
        """Returns the concatenated rows of these slots. Raises KeyError for slots not written by the latest forward."""
        if not self._index:
            self._index = {slot: row for row, slot in enumerate(self._slots.tolist())}
        (at,) = to_device([[self._index[slot] for slot in slots]], self._device)
        return self._rows.index_select(0, at).cpu().numpy().tobytes()

    def move(self, moves: Sequence[SlotMove]) -> None:
        """Does nothing: the next forward replaces all rows."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Does nothing: the next forward replaces all rows."""


class StateCache:
    """A `StateStore` with one row per slot, in one tensor of shape (pages x page size, row bytes)."""

    def __init__(self, pages: int, page_size: int, row_bytes: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._rows = torch.empty((pages * page_size, row_bytes), dtype=torch.uint8, device=device)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Writes rows, (n, row bytes), to slots, (n,)."""
        self._rows.index_copy_(0, slots, rows)

    def read(self, slots: Sequence[int]) -> bytes:
        """Returns the concatenated rows of these slots."""
        (at,) = to_device([slots], self._device)
        return self._rows.index_select(0, at).cpu().numpy().tobytes()

    def move(self, moves: Sequence[SlotMove]) -> None:
        """Copies individual slots, as one simultaneous copy."""
        if not moves:
            return
        sources, targets = to_device([[move.source for move in moves], [move.to for move in moves]], self._device)
        self._rows[targets] = self._rows[sources]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies whole pages."""
        if not copies:
            return
        sources, targets = to_device([[copy.source for copy in copies], [copy.to for copy in copies]], self._device)
        pages = self._rows.view(-1, self._page_size, self._rows.shape[1])
        pages[targets] = pages[sources]


MAX_E4M3 = 448.0  # largest finite e4m3 value
MIN_SCALE = 1e-12


def encode_rows(rows: Tensor, dtype: StateDtype) -> Tensor:
    """Encodes rows, (n, width), as bytes, (n, row bytes), on the same device."""
    if dtype is StateDtype.BFLOAT16:
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8)
    rows = rows.float()
    scales = (rows.abs().amax(dim=-1, keepdim=True) / MAX_E4M3).clamp_min_(MIN_SCALE)
    scaled = (rows / scales).clamp_(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
    return torch.cat([scaled.view(torch.uint8), scales.view(torch.uint8)], dim=-1)


def decode_rows(data: bytes, layout: StatesFormat) -> Tensor:
    """Decodes rows to float32, (n, width). The bytes come from a peer, so NaN and infinity become 0."""
    if not data:
        return torch.zeros(0, layout.width)
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, layout.row_bytes)
    if layout.dtype is StateDtype.BFLOAT16:
        rows = encoded.view(torch.bfloat16).float()
    else:
        elements = encoded[:, :-SCALE_BYTES].contiguous().view(torch.float8_e4m3fn)
        rows = elements.float() * encoded[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return torch.nan_to_num_(rows, nan=0.0, posinf=0.0, neginf=0.0)


StateProjection = Callable[[Tensor], Tensor]
"""Projects streams, (n, layers x hidden), to rows to send, (n, width)."""


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """Hidden states to capture on the leading rank. Pickled, so `load_projection` must be a module-level function."""

    layers: tuple[int, ...]
    format: StatesFormat
    load_projection: Callable[[torch.device], StateProjection] | None = None
    is_kept: bool = True  # True: store in pages beside the KV cache; False: store only the latest forward

    def projection_on(self, device: torch.device) -> StateProjection | None:
        """Loads the projection, if any."""
        return self.load_projection(device) if self.load_projection is not None else None


class StateCapture:
    """Encodes and stores the states of all fed tokens; `project` is the loaded projection of `spec`."""

    def __init__(
        self,
        spec: CaptureSpec,
        pages: int,
        page_size: int,
        device: torch.device,
        project: StateProjection | None = None,
    ) -> None:
        self.layers = spec.layers
        self.cache: StateStore = (
            StateCache(pages, page_size, spec.format.row_bytes, device) if spec.is_kept else LatestStates(device)
        )
        self._format = spec.format
        self._project = project

    def keep(self, slots: Tensor, streams: Tensor) -> None:
        """Stores one forward's streams, (n, layers x hidden), at the slots of its tokens, (n,)."""
        rows = self._project(streams) if self._project is not None else streams
        assert rows.shape[1] == self._format.width, f"states are {rows.shape[1]} wide, not {self._format.width}"
        self.cache.write(slots, encode_rows(rows, self._format.dtype))
