"""Log probabilities that a target reports: those of its tokens, and of the likeliest alternatives."""

from dataclasses import dataclass

from protos.frozen import value

MAX_TOP = 20  # most alternatives reported per place


@value
class TokenScore:
    """Score of one place: its token's log probability and rank, and the likeliest tokens there."""

    logprob: float
    rank: int  # 1: the likeliest token
    top_ids: tuple[int, ...] = ()  # likeliest first
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """Number of likeliest tokens to report per place; None: no scores for these places at all."""

    top: int | None = None  # for generated tokens
    prompt_top: int | None = None  # for prompt tokens

    @property
    def is_wanted(self) -> bool:
        return self.top is not None or self.prompt_top is not None


NO_SCORING = Scoring()
