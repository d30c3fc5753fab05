"""Bounds and thresholds of drafting with a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftingLimits:
    """How a draft model drafts.

    `top_k` entries of draft_probs are sent per token under ratio, as whole weights of which the likeliest token's is
    `weight_scale`: uint16 on the wire. Not under ratio, a block that is waited for ends once its chance to be accepted
    so far is below `min_confidence`: whoever waits for a block waits for its further tokens too, and that takes more
    than what verifies them. A forward feeds at most `pass_tokens`: longer prompts are read over several rounds, so that
    they neither keep the others' blocks waiting for long nor need more memory than there is. No token
    is fed from position `max_positions` on: a longer session gets no blocks.
    """

    top_k: int
    min_confidence: float = 0.0
    pass_tokens: int = 2048
    max_positions: int | None = None
    weight_scale: int = 60_000
