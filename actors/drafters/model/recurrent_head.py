"""Recurrent head (ReDrafter): predicts further tokens after a forward, at a fraction of the forward's cost.

After ReDrafter (Cheng et al. 2024, arXiv 2403.09919). A gated MLP maps the draft model's last hidden state and the
token sampled from it to a state for the next token, and so on. The LM head is the model's own. The head has no other
inputs, so it predicts worse than the model. It is much cheaper, because a small model's forward consists of hundreds of
small operations. The head is `recurrent_head.safetensors` in the draft folder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from actors.compute.linear import Product, Projection, projection
from actors.models.decoder import ForwardOutput, is_llama_kind, norm_of
from actors.models.weights import is_finite, read_tensors
from cluster.errors import ModelError

FILE = "recurrent_head.safetensors"
SHAPES = {"state_norm.weight": "d", "token_norm.weight": "d", "gate_up.weight": "2w x 2d", "down.weight": "d x w"}


class DraftHead(Protocol):
    """Predicts further tokens after a forward."""

    width: int  # tokens per forward, including the model's own token

    def predict_next(self, states: Tensor, tokens: Sequence[int]) -> ForwardOutput:
        """Predicts the token after each of `tokens`, sampled from `states`, (tokens, hidden)."""
        ...


class RecurrentHead:
    """A `DraftHead` with the draft model's embedding and some columns of its LM head."""

    def __init__(
        self,
        embedding: Tensor,
        head: Projection,
        weights: dict[str, Tensor],
        eps: float,
        width: int,
        product: Product,
    ) -> None:
        self.width = width
        self._embedding = embedding
        self._head = head
        self._state_norm = norm_of(weights["state_norm.weight"], eps)
        self._token_norm = norm_of(weights["token_norm.weight"], eps)
        self._gate_up = product(weights["gate_up.weight"], None)
        self._down = product(weights["down.weight"], None)

    @torch.inference_mode()
    def predict_next(self, states: Tensor, tokens: Sequence[int]) -> ForwardOutput:
        embedded = F.embedding(torch.tensor(tokens, device=states.device), self._embedding)
        inputs = torch.cat((self._state_norm(states), self._token_norm(embedded)), dim=-1)
        gate, up = self._gate_up(inputs).chunk(2, dim=-1)
        states = self._down.plus(F.silu(gate) * up, states)
        return ForwardOutput(self._head(states), states)


def load_recurrent_head(
    folder: Path,
    model: PreTrainedModel,
    width: int,
    product: Product = projection,
    columns: int | None = None,
) -> RecurrentHead | None:
    """Loads the head in the model's folder, if any, for `width` tokens per forward; call it before `decoder_for`.

    The head scores the first `columns` columns of the model's logits; None: all. Raises ModelError if the head does not
    match the model.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    if not is_llama_kind(model):
        raise ModelError(f"{path} needs a model with the Llama architecture, not {type(model).__name__}; remove it")
    stored = read_tensors(path)
    hidden = int(model.config.hidden_size)
    shapes = {name: tuple(weight.shape) for name, weight in stored.items()}
    wide = shapes.get("down.weight", (0, 0))[-1]
    if shapes != dict(zip(SHAPES, ((hidden,), (hidden,), (2 * wide, 2 * hidden), (hidden, wide)), strict=True)):
        raise ModelError(f"{path} has {shapes}, expected {SHAPES} for d = {hidden}; fetch it again")
    weights = {name: weight.to(model.device, model.dtype) for name, weight in stored.items()}
    if not all(is_finite(weight) for weight in weights.values()):
        raise ModelError(f"{path} holds NaN or infinite weights; fetch it again")
    whole = model.get_output_embeddings()
    head = product(whole.weight[:columns], None if whole.bias is None else whole.bias[:columns])
    embedding = model.get_input_embeddings().weight.detach()
    return RecurrentHead(embedding, head, weights, float(model.config.rms_norm_eps), width, product)
