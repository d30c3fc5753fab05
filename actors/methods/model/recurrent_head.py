"""Further tokens after a forward at a fraction of its cost, by a recurrent head (ReDrafter).

(After ReDrafter: Cheng et al. 2024, arXiv 2403.09919.) From the draft model's last hidden state and the token that was
taken after it, a gated MLP makes a state for the token after that, and so on; the LM head is the model's own. It looks
at nothing else, so it knows less than the model; but a forward of a small model is mostly its hundreds of operations.
The draft folder holds it as `recurrent_head.safetensors`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from actors.compute.linear import Product, Projection, projection
from actors.models.decoder import Decoder, LlamaDecoder, norm_of
from actors.models.forward_output import ForwardOutput
from cluster.errors import ModelError

FILE = "recurrent_head.safetensors"
SHAPES = {"state_norm.weight": "d", "token_norm.weight": "d", "gate_up.weight": "2w x 2d", "down.weight": "d x w"}


class DraftHead(Protocol):
    """Predicts tokens after those of a forward."""

    width: int  # tokens in all, the forward's own included

    def predict_next(self, states: Tensor, tokens: Sequence[int]) -> ForwardOutput:
        """What follows `tokens`, each taken after one of these states, (tokens, hidden)."""
        ...


class RecurrentHead:
    """A `DraftHead` over the embedding of the draft model and some columns of its head."""

    def __init__(
        self,
        embed: Callable[[Tensor], Tensor],
        head: Projection,
        weights: dict[str, Tensor],
        eps: float,
        width: int,
        product: Product,
    ) -> None:
        self.width = width
        self._embed = embed
        self._head = head
        self._state_norm = norm_of(weights["state_norm.weight"], eps)
        self._token_norm = norm_of(weights["token_norm.weight"], eps)
        self._gate_up = product(weights["gate_up.weight"], None)
        self._down = product(weights["down.weight"], None)

    @torch.inference_mode()
    def predict_next(self, states: Tensor, tokens: Sequence[int]) -> ForwardOutput:
        taken = self._embed(torch.tensor(tokens, device=states.device))
        inputs = torch.cat((self._state_norm(states), self._token_norm(taken)), dim=-1)
        gate, up = self._gate_up(inputs).chunk(2, dim=-1)
        states = self._down.plus(F.silu(gate) * up, states)
        return ForwardOutput(self._head(states), states)


def load_recurrent_head(
    folder: Path,
    model: PreTrainedModel,
    decoder: Decoder,
    width: int,
    product: Product = projection,
    columns: int | None = None,
) -> RecurrentHead | None:
    """The one in the model's folder, to predict `width` tokens a forward; None where there is none.

    It chooses among the first `columns` of the model's logits, or among all.

    Raises ModelError when it does not fit the model.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    if not isinstance(decoder, LlamaDecoder):
        raise ModelError(f"{path} needs a model of the Llama kind, not {type(model).__name__}")
    stored = load_file(path)
    hidden = int(model.config.hidden_size)
    shapes = {name: tuple(weight.shape) for name, weight in stored.items()}
    wide = shapes.get("down.weight", (0, 0))[-1]
    if shapes != dict(zip(SHAPES, ((hidden,), (hidden,), (2 * wide, 2 * hidden), (hidden, wide)), strict=True)):
        raise ModelError(f"{path} has {shapes}, expected {SHAPES} for d = {hidden}")
    weights = {name: weight.to(model.device, model.dtype) for name, weight in stored.items()}
    whole = model.get_output_embeddings()
    head = product(whole.weight[:columns], None if whole.bias is None else whole.bias[:columns])
    return RecurrentHead(decoder.embed, head, weights, float(model.config.rms_norm_eps), width, product)
