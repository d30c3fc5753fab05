"""The bounds of a target replica, and what a request or a block has to be to fit into them."""

from dataclasses import dataclass

from cluster.verification.early_messages import BufferLimits
from protos.messages import Acceptance, Block, Open
from protos.states import StatesFormat


@dataclass(frozen=True, slots=True)
class VerificationLimits:
    """Bounds of one target replica."""

    vocabulary: int  # token ids are below this
    max_context: int
    max_sessions: int  # in the cache at once; further ones queue
    max_step_tokens: int
    pages: int = 4096  # of the cache
    page_size: int = 16  # positions
    trees: bool = True  # whether the engine attends to them
    own_draws_only: bool = False  # whether all that the engine tells is what it draws itself
    states: StatesFormat | None = None  # of the hidden states that the engine captures, if it does
    keeps_states: bool = True  # whether it keeps them beside the cache
    max_queued: int = 1024
    buffer: BufferLimits = BufferLimits()  # for blocks that wait for a prefix or for a session

    def fault_of(self, request: Open, pages: int) -> str:
        """Why it could never be served; empty if it can. `pages` is how many it takes at its longest."""
        if (highest := max(max(request.tokens), request.rival or 0, request.rules.highest_id)) >= self.vocabulary:
            return f"token id {highest} is outside the vocabulary of {self.vocabulary}"
        if request.max_len > self.max_context:
            return f"max_len is {request.max_len}, the context holds {self.max_context} tokens"
        if self.own_draws_only and request.acceptance is Acceptance.RATIO and not request.sampling.greedy:
            return "acceptance is ratio, this target decides by its own draws; ask for coupled, as with a seed"
        if self.own_draws_only and request.scoring.prompt_top is not None:
            return "prompt_logprobs, or echo with logprobs: this target tells scores of generated tokens alone"
        if pages > self.pages:
            return f"max_len is {request.max_len}, the cache holds {self.pages * self.page_size} tokens"
        return ""

    def unfit(self, block: Block) -> str | None:
        """The cause for which a block is dropped whatever its session."""
        probs = block.tree.probs
        named = [block.tree.tokens, *(probs.token_ids if probs is not None else ())]
        if max(map(max, named)) >= self.vocabulary:
            return "out_of_vocabulary"
        if block.base_len + block.size > self.max_context:
            return "beyond_context"
        return None
