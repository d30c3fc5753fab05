"""What a target says of tokens: their log probabilities, and the likeliest ones beside them."""

from dataclasses import dataclass

from protos.values import value

MAX_TOP = 20  # likeliest tokens that are told of a place


@value
class TokenScore:
    """Of one place: how likely its token was, the how-manieth likeliest, and which ones were the likeliest."""

    logprob: float
    rank: int  # 1: no other is likelier
    top_ids: tuple[int, ...] = ()  # likeliest first
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """How many of the likeliest tokens are to be told of each place; None: nothing is told of the place at all."""

    top: int | None = None  # of generated tokens
    prompt_top: int | None = None  # of the prompt's

    @property
    def is_wanted(self) -> bool:
        return self.top is not None or self.prompt_top is not None


NO_SCORING = Scoring()
