"""A block that is being drafted by a model with a KV cache."""

from dataclasses import dataclass

from actors.drafters.model.draft_cache import Branch
from cluster.drafting.draft_state import BlockDraft


@dataclass(kw_only=True, eq=False)
class CachedDraft(BlockDraft):
    """A block with its cached branch. States that a draft head continues from are tensors, (hidden,)."""

    branch: Branch
    pending: list[int]  # tokens to feed next
    logits: int = 1  # number of last pending tokens that need logits

    def settle(self) -> None:
        super().settle()
        self.pending = list(self.tokens[len(self.branch.tokens) - self.base_len :])
