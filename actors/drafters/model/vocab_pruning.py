"""Smaller LM head for a draft model, over its most frequent tokens only.

For a small model, the LM head over a large vocabulary is most of the cost. The target still verifies over the full
vocabulary, so this costs a little acceptance and no exactness (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). The draft
folder lists the tokens in `frequent_tokens.json`: token ids, most frequent first.
"""

import json
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster.errors import ModelError

FILE = "frequent_tokens.json"


def read_frequent_tokens(folder: Path, vocabulary: int) -> list[int] | None:
    """Reads the ids from the folder's file; None if there is none. Raises ModelError if they do not fit."""
    path = folder / FILE
    if not path.is_file():
        return None
    ids = json.loads(path.read_text())
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and 0 <= i < vocabulary for i in ids):
        raise ModelError(f"{path} must be a list of token ids from 0 to {vocabulary - 1}")
    return ids


def reduce_head(model: PreTrainedModel, token_ids: Tensor) -> None:
    """Keeps only these rows of the model's LM head: column i of its logits is then `token_ids[i]`.

    The input embedding stays complete, since every token can be fed.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"a draft needs a linear head to be reduced, not {type(head).__name__}")
    reduced = nn.Linear(head.in_features, len(token_ids), bias=head.bias is not None, device="meta")
    reduced.weight = nn.Parameter(head.weight.detach()[token_ids], requires_grad=False)
    if head.bias is not None:
        reduced.bias = nn.Parameter(head.bias.detach()[token_ids], requires_grad=False)
    model.set_output_embeddings(reduced)
