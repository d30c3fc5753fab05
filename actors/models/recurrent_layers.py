"""Runs transformers' recurrent layers (linear attention, Mamba, short convolutions) row by row, with stored states.

Transformers passes all such layers a cache with convolution states and recurrent states. Here, a layer receives one row
at a time and a cache that holds only the state before that row.
"""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from actors.attention.hugging_face import BatchSlot
from actors.compute.recurrent_states import State
from cluster.errors import ModelError

CACHE_ARGUMENTS = ("cache_params", "past_key_values")
LIGHTNING = "slope_rate"  # attribute of lightning attention (MiniMax)
FEW_TOKENS = 16  # longest part of a row that Mamba 2 computes token by token
KEPT_INPUTS = 16  # inputs per page and layer that the memory plan allows for; a page holds those of one block


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the layers whose state depends on the whole text before a token: those with a convolution, and lightning
    attention.
    """
    return [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx")
        and (any(isinstance(child, nn.Conv1d) for child in module.children()) or hasattr(module, LIGHTNING))
    ]


def run_row_by_row(model: PreTrainedModel, slot: BatchSlot) -> None:
    """Makes a model's recurrent layers compute the rows of the batch in the slot; idempotent.

    Raises ModelError for layers whose results depend on the number of tokens in a row.
    """
    for module in recurrent_layers(model):
        if getattr(module, "time_step_limit", (0.0,))[0] > 0:  # as in Nemotron-H and Zamba 2
            raise ModelError(
                f"{type(module).__name__} limits time steps in transformers' code for prompts, but not for single"
                " tokens"
            )
        if not isinstance(module.forward, _RowByRow):
            module.forward = _RowByRow(module, slot)


class _RowByRow:
    """Replaces the forward of a recurrent layer; ignores all arguments but the hidden states."""

    def __init__(self, module: nn.Module, slot: BatchSlot) -> None:
        self._layer = _TransformersLayer(module)
        self._slot = slot

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Computes (1, total, hidden) -> (1, total, hidden); lightning attention returns a pair."""
        outputs = self._slot.batch.recur(self._layer.index, hidden_states[0], self._layer.advance).unsqueeze(0)
        return (outputs, None) if self._layer.is_lightning else outputs


class _TransformersLayer:
    """A layer in transformers' code, with its state as an argument and a result."""

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        self.index = int(module.layer_idx)  # type: ignore[arg-type]
        self._states = int(getattr(getattr(module, "config", None), "number_of_conv_states", 1))
        # Mamba's scan of several tokens starts from an empty state, so further tokens go one by one. Mamba 2's scan
        # computes whole chunks, of 256 tokens in most models, so a few tokens are faster one by one on a CPU.
        is_mamba = hasattr(module, "x_proj") and hasattr(module, "dt_proj")
        scans_chunks = hasattr(module, "chunk_size") and next(module.parameters()).device.type == "cpu"
        self._longest_stepwise = sys.maxsize if is_mamba else FEW_TOKENS if scans_chunks else 1
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = next(name for name in CACHE_ARGUMENTS if name in parameters)
        required = [
            name for name, one in parameters.items() if one.default is one.empty and one.kind is not one.VAR_KEYWORD
        ]
        self._unused = dict.fromkeys(required[1:])  # arguments that the layer ignores without a mask
        self.is_lightning = hasattr(module, LIGHTNING)

    def advance(self, inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Implements `actors.compute.recurrent_states.Advance`."""
        if state is None or not 1 < len(inputs) <= self._longest_stepwise:
            return self._pass(inputs, state)
        outputs = []
        for token in torch.split(inputs, 1):
            output, state = self._pass(token, state)
            outputs.append(output)
        return torch.cat(outputs), state

    def _pass(self, inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
        stored = LinearAttentionLayer(self._states)
        if state is not None:
            _restore(stored, state)
        cache = _StateCache(layers=[LinearAttentionLayer() for _ in range(self.index)] + [stored])
        outputs = self._forward(inputs.unsqueeze(0), **self._unused | {self._cache_argument: cache})
        after = (*stored.conv_states.values(), *stored.recurrent_states.values())
        return outputs[0][0] if self.is_lightning else outputs[0], after


class _StateCache(Cache):  # type: ignore[misc]
    """Cache that also implements MiniMax's interface to the state of lightning attention."""

    def get_linear_cache(self, layer: int) -> Tensor | None:
        state: Tensor | None = self.get_recurrent_state(layer)
        return state

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        self.update_recurrent_state(state, layer)


def _restore(stored: LinearAttentionLayer, state: State) -> None:
    """Fills a layer's cache with copies of a state, since transformers updates states in place."""
    convolved, recurrent = state[: len(state) // 2], state[len(state) // 2 :]
    for index, part in enumerate(convolved):
        stored.has_previous_state[index] = True
        if part is not None:
            stored.conv_states[index] = part.clone()
            stored.conv_kernel_size[index] = part.shape[-1]
            stored.is_conv_states_initialized[index] = True
    for index, part in enumerate(recurrent):
        if part is not None:
            stored.recurrent_states[index] = part.clone()
            stored.is_recurrent_states_initialized[index] = True


@torch.inference_mode()
def recurrent_page_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of a page's recurrent states and inputs over all layers; 0 without recurrent layers.

    Computes every recurrent layer for one token, on all ranks, since a state's size depends on the layer's code. The
    page that a session currently fills may hold a second state, which fits in the memory left free.
    """
    hidden = int(model.config.get_text_config().hidden_size)
    token = torch.zeros(1, hidden, dtype=model.dtype, device=model.device)
    total = 0
    for module in recurrent_layers(model):
        _, state = _TransformersLayer(module).advance(token, None)
        total += sum(part.nbytes for part in state if part is not None) + KEPT_INPUTS * token.nbytes
    return total
