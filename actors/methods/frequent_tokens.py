"""A smaller LM head for a draft model: logits of frequent tokens only, the rest is never proposed.

On a small model the head over a large vocabulary is most of the cost; the target still verifies over all of it, so
this costs a little acceptance and no exactness (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). The draft folder
says which tokens, in `frequent_tokens.json`: a list of token ids. Knows nothing of drafting.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster.errors import ModelError

FILE = "frequent_tokens.json"


class FrequentTokensHead(nn.Module):
    """Computes rows `token_ids` of a head and gives -inf for all others, shape (..., vocabulary)."""

    def __init__(self, head: nn.Linear, token_ids: Tensor) -> None:
        super().__init__()
        self.token_ids: Tensor
        self.weight: Tensor
        self.bias: Tensor | None
        self.vocabulary = head.out_features
        self.register_buffer("token_ids", token_ids)
        self.register_buffer("weight", head.weight.detach()[token_ids].clone())
        self.register_buffer("bias", head.bias.detach()[token_ids].clone() if head.bias is not None else None)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = hidden.new_full((*hidden.shape[:-1], self.vocabulary), -torch.inf)
        logits[..., self.token_ids] = F.linear(hidden, self.weight, self.bias)
        return logits


def read_frequent_tokens(folder: Path, vocabulary: int) -> Tensor | None:
    """The ids in the folder's file, sorted; None when it has none. Raises ModelError when they do not fit."""
    path = folder / FILE
    if not path.is_file():
        return None
    ids = json.loads(path.read_text())
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and 0 <= i < vocabulary for i in ids):
        raise ModelError(f"{path} must be a list of token ids from 0 to {vocabulary - 1}")
    return torch.tensor(sorted(set(ids)))


def reduce_head(model: PreTrainedModel, token_ids: Tensor) -> None:
    """Replaces the model's head; the input embedding stays whole, for every token can be fed."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{FILE} needs a model with a linear head, not {type(head).__name__}")
    model.set_output_embeddings(FrequentTokensHead(head, token_ids.to(head.weight.device)))
