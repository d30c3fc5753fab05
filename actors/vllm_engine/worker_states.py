"""Hidden states in vLLM's leading worker: which layers the model reports, and what is kept of them beside the cache.

vLLM's second model runner passes them, with the places of what it fed, to its drafting component after each step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from actors.engine.capture import CaptureSpec, StateCapture
from cluster.errors import ModelError


class WorkerStates:
    """Hidden states of all that the model is fed, at the same places as in the cache."""

    def __init__(self, spec: CaptureSpec, runner: Any) -> None:
        """Must run before vLLM measures free memory, since the projection takes some, and before graph capture.

        Raises ModelError for layers that the model does not report.
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
        """Starts keeping states; `layer` is a layer whose pages they parallel."""
        self._layer = layer
        self._capture = StateCapture(self._spec, pages, page_size, self._device, self._project)

    def captured(self, batch: Any, slots: Mapping[str, torch.Tensor], final: torch.Tensor, inner: Any) -> None:
        """Stores one step's states: the final ones of all its tokens, (n, hidden), and those of each other layer."""
        assert self._capture is not None, "they are kept somewhere"
        streams = [*(inner or ()), *([final] if self._has_final else ())]
        fed = batch.num_tokens  # the rest is padding
        self._capture.keep(slots[self._layer][:fed].long(), torch.cat([each[:fed] for each in streams], dim=-1))

    def read(self, places: Sequence[int]) -> bytes:
        assert self._capture is not None, "they are kept somewhere"
        return self._capture.cache.read(places)


def _tell(runner: Any, layers: Sequence[int]) -> None:
    """Makes the model report the hidden states after these layers, as it does for EAGLE-3."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not supports_eagle3(runner.model):
        raise ModelError(
            f"vLLM's {type(runner.model).__name__} tells its final states alone, those of layers {list(layers)} are"
            " needed; use a head that reads the final ones, or target.engine slipstream"
        )
    runner.model.set_aux_hidden_state_layers(tuple(layers))
    runner.use_aux_hidden_state_outputs = True
