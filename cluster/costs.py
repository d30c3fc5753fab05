"""What forwards and messages cost in time, measured or stated: data that can be published, saved and loaded.

Replicas publish what they measured at their start; the simulator and `slipstream plan` run on it.
"""

from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.config_errors import error_lines
from cluster.errors import ConfigError


class _Cost(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ForwardCost(_Cost):
    """Seconds of one forward: a curve over its tokens, linear between points, and something for each row."""

    by_tokens: tuple[tuple[int, float], ...] = Field(min_length=1, description="(tokens, seconds), tokens rising")
    per_row_s: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _rising(self) -> Self:
        tokens = [at for at, _ in self.by_tokens]
        if any(later <= earlier for earlier, later in pairwise(tokens)):
            raise ValueError(f"by_tokens has tokens {tokens}, expected them to rise")
        if min(seconds for _, seconds in self.by_tokens) < 0:
            raise ValueError("by_tokens has negative seconds")
        return self

    @classmethod
    def linear(cls, base_s: float, per_row_s: float = 0.0, per_token_s: float = 0.0) -> Self:
        return cls(by_tokens=((0, base_s), (1, base_s + per_token_s)), per_row_s=per_row_s)

    def times(self, factor: float) -> Self:
        """The same shape, so many times as slow."""
        points = tuple((tokens, factor * seconds) for tokens, seconds in self.by_tokens)
        return type(self)(by_tokens=points, per_row_s=factor * self.per_row_s)

    def plus(self, seconds: float) -> Self:
        """With so much more for each forward."""
        points = tuple((tokens, at + seconds) for tokens, at in self.by_tokens)
        return type(self)(by_tokens=points, per_row_s=self.per_row_s)

    def seconds(self, rows: float, tokens: float) -> float:
        """Beyond the last point the curve goes on as between the last two; below the first it is level."""
        return self._at(tokens) + self.per_row_s * rows

    def _at(self, tokens: float) -> float:
        points = self.by_tokens
        if tokens <= points[0][0] or len(points) == 1:
            return points[0][1]
        right = min(bisect_left(points, (tokens, 0.0)), len(points) - 1)
        (x0, y0) = points[right - 1]
        (x1, y1) = points[right]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


class DraftCost(_Cost):
    """Seconds of one drafting pass: of its forwards, one after the other, and something for the pass.

    A forward predicts up to `tokens_per_forward` tokens in each row, each of them after the first for `further` more.
    Both curves are over rows.
    """

    forward: ForwardCost
    further: ForwardCost = ForwardCost.linear(0.0)
    per_pass_s: float = Field(0.0, ge=0)
    tokens_per_forward: int = Field(1, ge=1)

    def times(self, factor: float) -> Self:
        """The same shape, so many times as slow."""
        slower = {
            "forward": self.forward.times(factor),
            "further": self.further.times(factor),
            "per_pass_s": factor * self.per_pass_s,
        }
        return self.model_copy(update=slower)

    def seconds(self, rows: float, tokens: int) -> float:
        """`tokens` is the length of the longest block of the pass."""
        return self.per_pass_s + self.forwards(tokens) * self.forward_s(rows, tokens)

    def forwards(self, tokens: int) -> int:
        """That a block of so many tokens takes."""
        return -(-tokens // self.tokens_per_forward)

    def forward_s(self, rows: float, tokens: int) -> float:
        """One forward over so many rows, to name as much of blocks of so many tokens as it can."""
        further = max(0, min(tokens, self.tokens_per_forward) - 1)
        return self.forward.seconds(rows, rows) + further * self.further.seconds(rows, rows)


class CostModel(_Cost):
    """Everything that takes time, and what drafts are good for where that was measured with it."""

    target: ForwardCost
    draft: DraftCost
    plain: ForwardCost | None = Field(
        None, description="a target's step of one token a row while nobody drafts, where it differs"
    )
    hop_s: float = Field(0.0005, ge=0, description="one way between any two processes")
    acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = Field(
        None, min_length=1, description="of a block's tokens by position, each given those before it"
    )

    def plain_s(self, rows: float) -> float:
        """A target's step of one token a row while nobody drafts.

        Drafters on the target's own machine take from its cores, caches and memory.
        """
        return (self.plain or self.target).seconds(rows, rows)

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ConfigError that names the file and the wrong keys."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read costs {path}: {error.strerror}") from error
        except ValidationError as error:
            lines = error_lines(error, cls, whole="costs")
            raise ConfigError(f"wrong costs in {path}\n  " + "\n  ".join(lines)) from error
