"""Capture of the target's hidden states: which streams a forward keeps, what is made of them, and where they lie."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.compute.state_cache import LatestStates, StateCache, StateStore
from actors.compute.state_codec import encode_rows
from protos.states import StatesFormat

StateProjection = Callable[[Tensor], Tensor]
"""What the target makes of the streams, (n, layers x hidden), before they are sent: (n, width)."""


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """What the leading rank is told to capture. Pickled: `load_projection` is a function of a module."""

    layers: tuple[int, ...]
    format: StatesFormat
    load_projection: Callable[[torch.device], StateProjection] | None = None
    is_kept: bool = True  # beside the KV cache; else there are those of the latest forward alone

    def projection_on(self, device: torch.device) -> StateProjection | None:
        """Loads it, if there is one."""
        return self.load_projection(device) if self.load_projection is not None else None


class StateCapture:
    """The states of all that is fed, encoded; `project` is the spec's projection, loaded."""

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

    def keep(self, places: Tensor, streams: Tensor) -> None:
        """Of the tokens of one forward: the places that they were written to, (n,), and their streams."""
        rows = self._project(streams) if self._project is not None else streams
        assert rows.shape[1] == self._format.width, f"states are {rows.shape[1]} wide, not {self._format.width}"
        self.cache.write(places, encode_rows(rows, self._format.dtype))
