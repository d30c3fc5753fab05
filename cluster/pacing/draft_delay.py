"""How long a block takes that was not drafted ahead: measured, for pacing.

Pure arithmetic; times are handed in.
"""

from protos.values import value


@value
class DraftDelay:
    """From a verdict to its block: `base_s` + `token_s` per token, by least squares over decayed measurements."""

    weight: float = 0.0
    tokens: float = 0.0  # weighted sums: of tokens, seconds, tokens squared, tokens x seconds
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0

    def after(self, tokens: int, seconds: float) -> "DraftDelay":
        keep = 0.99
        return DraftDelay(
            keep * self.weight + 1,
            keep * self.tokens + tokens,
            keep * self.seconds + seconds,
            keep * self.tokens_squared + tokens * tokens,
            keep * self.product + tokens * seconds,
        )

    @property
    def token_s(self) -> float:
        """Of one token more; 0 while all steps were of one size."""
        spread = self.weight * self.tokens_squared - self.tokens**2
        if spread <= 1e-6 * self.tokens_squared:
            return 0.0
        slope = (self.weight * self.product - self.tokens * self.seconds) / spread
        return min(max(0.0, slope), self.seconds / self.tokens)

    @property
    def base_s(self) -> float:
        """Before the first token."""
        return max(0.0, self.seconds - self.token_s * self.tokens) / self.weight if self.weight else 0.0
