"""Hidden states in vLLM's leading worker: which streams its model tells, and what is kept of them beside the cache.

vLLM's second model runner hands them, with the places of what it fed, to whoever drafts in its process after each step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from actors.engine.capture import CaptureSpec, StateCapture
from cluster.errors import ModelError


class WorkerStates:
    """Of all that the model is fed, at the places where the cache has it."""

    def __init__(self, spec: CaptureSpec, runner: Any) -> None:
        """Before vLLM measures how much memory is left: the projection takes some, and graphs are yet to be made.

        Raises ModelError for layers that the model does not tell of.
        """
        self._device: torch.device = runner.device
        self._spec = spec
        self._project = spec.projection_on(self._device)
        last = int(runner.model_config.hf_text_config.num_hidden_layers)
        inner = [layer for layer in spec.layers if layer < last]
        self._has_final = spec.layers[-1] == last
        if inner:
            _tell(runner, inner)
        self._layer = ""
        self._capture: StateCapture | None = None

    def keep(self, layer: str, pages: int, page_size: int) -> None:
        """From now on; `layer` is one whose pages they lie beside."""
        self._layer = layer
        self._capture = StateCapture(self._spec, pages, page_size, self._device, self._project)

    def captured(self, batch: Any, slots: Mapping[str, torch.Tensor], final: torch.Tensor, inner: Any) -> None:
        """Of one step: the final states of all its tokens, (n, hidden), and those of each other layer."""
        assert self._capture is not None, "they are kept somewhere"
        streams = [*(inner or ()), *([final] if self._has_final else ())]
        fed = batch.num_tokens  # what comes after is padding
        self._capture.keep(slots[self._layer][:fed].long(), torch.cat([each[:fed] for each in streams], dim=-1))

    def read(self, places: Sequence[int]) -> bytes:
        assert self._capture is not None, "they are kept somewhere"
        return self._capture.cache.read(places)


def _tell(runner: Any, layers: Sequence[int]) -> None:
    """Has the model tell the streams after so many of its layers, as it does for EAGLE-3."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not supports_eagle3(runner.model):
        raise ModelError(
            f"vLLM's {type(runner.model).__name__} tells its final states alone, those of layers {list(layers)} are"
            " needed; use a head that reads the final ones, or target.engine slipstream"
        )
    runner.model.set_aux_hidden_state_layers(tuple(layers))
    runner.use_aux_hidden_state_outputs = True
