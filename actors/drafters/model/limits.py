"""Bounds and thresholds of drafting with a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftingLimits:
    """Bounds and thresholds of a draft model.

    Under rejection sampling, `top_k` entries of draft_probs are sent per token, as integer weights (uint16 on the wire)
    scaled so that the likeliest token has `weight_scale`. Otherwise a block that the target waits for ends once its
    cumulative acceptance probability is below `min_confidence`: the target waits for the further tokens too, which
    takes longer than verifying them saves. A forward feeds at most `pass_tokens`, so a long prompt is read over several
    rounds, neither delaying other blocks for long nor exceeding memory. No token is fed at position `max_positions` or
    later: a longer session gets no blocks.
    """

    top_k: int
    min_confidence: float = 0.0
    pass_tokens: int = 2048
    max_positions: int | None = None
    weight_scale: int = 60_000
