"""The recurrent head with trainable weights; `actors.drafters.model.recurrent_head` runs it while serving.

After ReDrafter (Cheng et al. 2024, arXiv 2403.09919). From the draft's last hidden state and the token sampled from it,
the head computes the state for the following token, and so on. It reads nothing else, so it is trained together with
the draft: if only the draft's states changed, the head's predictions would get worse.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from actors.drafters.model.recurrent_head import FILE


class TrainableRecurrentHead(nn.Module):
    """Adds the output of a gated MLP over state and token embedding to the state."""

    def __init__(self, hidden: int, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.state_norm = nn.RMSNorm(hidden, eps=eps)
        self.token_norm = nn.RMSNorm(hidden, eps=eps)
        self.gate_up = nn.Linear(2 * hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        """Returns the states after one more token; all tensors are (rows, hidden)."""
        inputs = torch.cat((self.state_norm(state), self.token_norm(embedding)), dim=-1)
        gate, up = self.gate_up(inputs).chunk(2, dim=-1)
        following: Tensor = state + self.down(F.silu(gate) * up)
        return following

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes the weights to a draft's folder."""
        save_file({name: weight.to(dtype).contiguous() for name, weight in self.state_dict().items()}, folder / FILE)

    @classmethod
    def load(cls, folder: Path, eps: float = 1e-5) -> "TrainableRecurrentHead":
        """Reads the weights from a draft's folder, as float32."""
        weights = load_file(folder / FILE)
        hidden, width = weights["down.weight"].shape
        head = cls(hidden, width, eps)
        head.load_state_dict({name: weight.float() for name, weight in weights.items()})
        return head
