"""The check of a drafter that has just started: does the target accept its first tokens as often as expected?

The expectation is a figure published with the draft, or else the draft's own confidence: the probability that it gave
its tokens. The check uses the first requests, in which each token is the target's own.
"""

from protos.frozen import value

TOKENS = 64  # first tokens of blocks that are checked: an error of at most 0.06, in a second or two on a fast pair
FAR_BELOW = 0.5  # share of the expected acceptance below which it warns
LEAST = 0.2  # acceptance expected of any draft: one that is unsure everywhere is damaged rather than modest

CAUSES = (
    "usual causes: another tokenizer or chat template than the target's, a draft made for another target, "
    "a wrong dtype, RoPE setting or quantisation, damaged weights"
)


@value
class LoadCheck:
    """State of the check; it is over after TOKENS tokens."""

    published: float | None = None  # share of accepted first tokens stated in the draft's folder
    tokens: int = 0
    accepted: int = 0
    confidence: float = 0.0  # sum over all tokens

    @property
    def is_over(self) -> bool:
        return self.tokens >= TOKENS

    @property
    def expected(self) -> float | None:
        """Expected share of accepted first tokens; None before anything was measured or published."""
        if self.published is not None:
            return self.published
        return max(LEAST, self.confidence / self.tokens) if self.tokens else None

    @property
    def reached(self) -> float | None:
        """Share of first tokens that were accepted; None before any."""
        return self.accepted / self.tokens if self.tokens else None

    @property
    def warning(self) -> str | None:
        """Text of the warning, or None if nothing is wrong."""
        expected = self.expected
        reached = self.reached
        if not self.is_over or expected is None or reached is None or reached >= FAR_BELOW * expected:
            return None
        source = "its own confidence" if self.published is None else "the figure in its folder"
        shares = f"{100 * reached:.0f} % of its first tokens, where {source} promises {100 * expected:.0f} %"
        return f"the target accepts {shares}; {CAUSES}"

    def summary(self) -> dict[str, float | str | None]:
        """Returns the check's state for display."""
        return {
            "expected": self.expected,
            "reached": self.reached,
            "tokens": self.tokens,
            "is_over": self.is_over,
            "warning": self.warning,
        }

    def after(self, confidence: float, accepted: bool) -> "LoadCheck":
        """Returns the check after a first token that the draft gave the probability `confidence` was accepted or
        not."""
        if self.is_over:
            return self
        return LoadCheck(self.published, self.tokens + 1, self.accepted + accepted, self.confidence + confidence)
