"""A recurrent head: further tokens after the next one, each for a small part of what a forward of the draft costs.

(After ReDrafter: Cheng et al. 2024, arXiv 2403.09919.) From the draft's last hidden state and the token that was named
by it, the head makes a state that names the one after; and so on. It looks at nothing else, so it knows less than the
draft does; but a forward of the draft reads all layers' weights and takes hundreds of small operations.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FILE = "recurrent_head.safetensors"


class RecurrentHead(nn.Module):
    """A gated MLP over state and token embedding, added to the state."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.state_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.token_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate_up = nn.Linear(2 * hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        """The state after one token more; all [rows, hidden]."""
        gate, up = self.gate_up(torch.cat((self.state_norm(state), self.token_norm(embedding)), dim=-1)).chunk(
            2, dim=-1
        )
        return state + self.down(F.silu(gate) * up)

    def save(self, folder: Path) -> None:
        save_file({name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> RecurrentHead:
        weights = load_file(folder / FILE)
        hidden, width = weights["down.weight"].shape
        head = cls(hidden, width)
        head.load_state_dict({name: value.float() for name, value in weights.items()})
        return head
