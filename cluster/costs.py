"""Cost model: measured or given durations of forward passes and messages, which can be published, saved and loaded.

Replicas publish the costs measured at startup for the simulator and `slipstream plan`.
"""

from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.config import error_lines
from cluster.errors import ConfigError


class _Cost(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ForwardCost(_Cost):
    """Duration of one forward pass, in seconds: a piecewise linear function of its tokens, plus a constant per row."""

    by_tokens: tuple[tuple[int, float], ...] = Field(
        min_length=1, description="(tokens, seconds) points, in increasing order of tokens"
    )
    per_row_s: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _rising(self) -> Self:
        tokens = [at for at, _ in self.by_tokens]
        if any(later <= earlier for earlier, later in pairwise(tokens)):
            raise ValueError(f"by_tokens is not sorted by tokens: {tokens}; list its points in increasing order")
        if min(seconds for _, seconds in self.by_tokens) < 0:
            raise ValueError("by_tokens has negative durations; use 0 or more seconds")
        return self

    @classmethod
    def linear(cls, base_s: float, per_row_s: float = 0.0, per_token_s: float = 0.0) -> Self:
        return cls(by_tokens=((0, base_s), (1, base_s + per_token_s)), per_row_s=per_row_s)

    def times(self, factor: float) -> Self:
        """Returns the cost with all durations multiplied by `factor`."""
        points = tuple((tokens, factor * seconds) for tokens, seconds in self.by_tokens)
        return type(self)(by_tokens=points, per_row_s=factor * self.per_row_s)

    def plus(self, seconds: float) -> Self:
        """Returns the cost with `seconds` added to each forward pass."""
        points = tuple((tokens, at + seconds) for tokens, at in self.by_tokens)
        return type(self)(by_tokens=points, per_row_s=self.per_row_s)

    def seconds(self, rows: float, tokens: float) -> float:
        """Returns the duration of a forward pass of `tokens` tokens in `rows` rows, in seconds.

        The function is constant below the first point and extrapolated linearly beyond the last.
        """
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
    """Duration of one drafting pass, in seconds: its forward passes, plus a constant.

    A forward pass predicts up to `tokens_per_forward` tokens per row. `forward` is the cost with one predicted token;
    each further token adds `further`. Both are functions of the number of rows.
    """

    forward: ForwardCost
    further: ForwardCost = ForwardCost.linear(0.0)
    per_pass_s: float = Field(0.0, ge=0)
    tokens_per_forward: int = Field(1, ge=1)

    def times(self, factor: float) -> Self:
        """Returns the cost with all durations multiplied by `factor`."""
        slower = {
            "forward": self.forward.times(factor),
            "further": self.further.times(factor),
            "per_pass_s": factor * self.per_pass_s,
        }
        return self.model_copy(update=slower)

    def seconds(self, rows: float, tokens: int) -> float:
        """Returns the duration of a pass over `rows` rows, in seconds; `tokens` is the length of the longest block."""
        return self.per_pass_s + self.forwards(tokens) * self.forward_s(rows, tokens)

    def forwards(self, tokens: int) -> int:
        """Returns the number of forward passes needed for a block of `tokens` tokens."""
        return -(-tokens // self.tokens_per_forward)

    def forward_s(self, rows: float, tokens: int) -> float:
        """Returns the duration, in seconds, of one forward pass over `rows` rows in blocks of `tokens` tokens."""
        further = max(0, min(tokens, self.tokens_per_forward) - 1)
        return self.forward.seconds(rows, rows) + further * self.further.seconds(rows, rows)


class CostModel(_Cost):
    """All durations of a deployment, with the drafts' acceptance rates if measured."""

    target: ForwardCost
    draft: DraftCost
    non_speculative: ForwardCost | None = Field(
        None,
        description="target step of one token per row without drafting, with the time to the next one; default: target",
    )
    hop_s: float = Field(0.0005, ge=0, description="one-way latency between two processes, in seconds")
    host_step_s: float = Field(3e-5, ge=0, description="time from a target step's outcome to the next plan, in seconds")
    host_row_s: float = Field(8e-6, ge=0, description="further such time per session, in seconds")
    acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = Field(
        None, min_length=1, description="acceptance rate by block position, given acceptance of the earlier positions"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_earlier_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and "plain" in data:
            raise ValueError("plain was renamed to non_speculative")
        return data

    def non_speculative_s(self, rows: float) -> float:
        """Returns the duration of a target step of one token per row while no drafter runs, in seconds.

        Such steps can be faster, because drafters on the same machine compete for cores, caches and memory bandwidth.
        """
        if self.non_speculative is not None:
            return self.non_speculative.seconds(rows, rows)
        return self.step_s(rows, rows)

    def step_s(self, rows: float, tokens: float) -> float:
        """Returns the duration of a target step and of the host's work before the next one, in seconds.

        `benchmarks/host_cost.py` measures the host's work.
        """
        return self.target.seconds(rows, tokens) + self.host_step_s + self.host_row_s * rows

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Loads costs from a file; raises ConfigError, which names the file and the invalid keys."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read costs {path}: {error.strerror}") from error
        except ValidationError as error:
            lines = error_lines(error, cls, whole="costs")
            raise ConfigError(f"wrong costs in {path}\n  " + "\n  ".join(lines)) from error
