"""A block while it is being drafted by a model that caches what it was fed."""

from dataclasses import dataclass

from actors.methods.model.draft_cache import Branch
from cluster.drafting.block_draft import BlockDraft


@dataclass(kw_only=True, eq=False)
class CachedDraft(BlockDraft):
    """States that a draft head goes on from are tensors, (hidden,)."""

    branch: Branch
    pending: list[int]  # tokens to feed next
    logits: int = 1  # are wanted of the last so many of them

    def settle(self) -> None:
        super().settle()
        self.pending = list(self.tokens[len(self.branch.tokens) - self.base_len :])
