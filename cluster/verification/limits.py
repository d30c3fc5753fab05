"""Limits of a target replica, and the checks of requests and blocks against them."""

from dataclasses import dataclass

from cluster.verification.orphan_buffer import BufferLimits
from protos.messages import Acceptance, Block, Open
from protos.states import StatesFormat


@dataclass(frozen=True, slots=True)
class VerificationLimits:
    """Limits of one target replica."""

    vocabulary: int  # token ids are below this
    max_context: int
    max_sessions: int  # concurrent sessions in the cache; further ones queue
    max_step_tokens: int
    pages: int = 4096  # in the cache
    page_size: int = 16  # positions per page
    trees: bool = True  # whether the engine can verify draft trees
    own_draws_only: bool = False  # whether the engine reports only its own draws, no probabilities
    states: StatesFormat | None = None  # format of captured hidden states; None: not captured
    keeps_states: bool = True  # whether the engine keeps hidden states beside the cache
    max_queued: int = 1024
    buffer: BufferLimits = BufferLimits()  # for blocks that wait for a prefix or for a session

    def fault_of(self, request: Open, pages: int) -> str:
        """Returns why a request could never be served, or "" if it can; `pages` is its need at full length."""
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
        """Returns the cause for which a block is dropped in any session, or None."""
        probs = block.tree.probs
        named = [block.tree.tokens, *(probs.token_ids if probs is not None else ())]
        if max(map(max, named)) >= self.vocabulary:
            return "out_of_vocabulary"
        if block.base_len + block.size > self.max_context:
            return "beyond_context"
        return None
