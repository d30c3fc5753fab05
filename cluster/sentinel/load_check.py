"""The check of a drafter that has just begun: does the target take its first tokens as often as is to be expected?

What is to be expected is a figure that was published with the draft, or else the draft's own confidence: the chance
that it gave the tokens itself. The texts are those of the first requests, of which each token is the target's own.
"""

from protos.values import value

TOKENS = 64  # first tokens of blocks that it takes: the error is at most 0.06, and on a quick pair a second or two
FAR_BELOW = 0.5  # of what is expected
LEAST = 0.2  # to be expected of any draft: one that is itself in doubt everywhere is damaged rather than modest

CAUSES = (
    "usual causes: another tokenizer or chat template than the target's, a draft made for another target, "
    "a wrong dtype, RoPE setting or quantisation, damaged weights"
)


@value
class LoadCheck:
    """So far; over once it has seen TOKENS."""

    published: float | None = None  # share of first tokens to be accepted, as the draft's folder says
    tokens: int = 0
    accepted: int = 0
    confidence: float = 0.0  # of all tokens together

    @property
    def is_over(self) -> bool:
        return self.tokens >= TOKENS

    @property
    def expected(self) -> float | None:
        """Share of first tokens to be accepted; None before anything was seen or published."""
        if self.published is not None:
            return self.published
        return max(LEAST, self.confidence / self.tokens) if self.tokens else None

    @property
    def reached(self) -> float | None:
        """Share of first tokens that were accepted."""
        return self.accepted / self.tokens if self.tokens else None

    @property
    def warning(self) -> str | None:
        """What is wrong, if anything is."""
        expected = self.expected
        reached = self.reached
        if not self.is_over or expected is None or reached is None or reached >= FAR_BELOW * expected:
            return None
        source = "its own confidence" if self.published is None else "the figure in its folder"
        shares = f"{100 * reached:.0f} % of its first tokens, where {source} promises {100 * expected:.0f} %"
        return f"the target accepts {shares}; {CAUSES}"

    def summary(self) -> dict[str, float | str | None]:
        """For whoever shows it."""
        return {
            "expected": self.expected,
            "reached": self.reached,
            "tokens": self.tokens,
            "is_over": self.is_over,
            "warning": self.warning,
        }

    def after(self, confidence: float, accepted: bool) -> "LoadCheck":
        """A first token was decided about, to which the draft gave this chance."""
        if self.is_over:
            return self
        return LoadCheck(self.published, self.tokens + 1, self.accepted + accepted, self.confidence + confidence)
