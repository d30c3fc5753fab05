"""One audit: a request that has ended is decided again, one token a step, and compared with what was committed.

It needs no ledger of its own. Until plain decoding says another token, what it has decided is the beginning of what
was committed; so an audit that had to leave its target goes on elsewhere from there. Where it says another token, it
asks by how much: a near-tie is passed on the committed side, for only there do both go on alike. Anything else is a
difference, and the audit ends with what plain decoding says next.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from cluster.routing.session import Generation
from protos.messages import Acceptance, Finish, Open, Sampling, Verdict
from protos.prefix import Prefix

RECORDED_TOKENS = 32  # of each continuation, from the difference on
NEAR_TIES: Mapping[str, float] = MappingProxyType({"float32": 2e-3, "float16": 0.06, "bfloat16": 0.5})
"""By dtype: margins of logits below which another order of additions may decide."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What an audit found that no near-tie explains."""

    session: str
    prompt_len: int
    position: int  # of the first token that differs, in the answer
    margin: float | None  # by which plain decoding's token was ahead, in logits
    committed: tuple[int, ...]  # the tokens from there on
    plain: tuple[int, ...]
    sampling: Sampling
    seed: int
    choice: int
    acceptance: Acceptance
    max_draft_tokens: int
    served_by: tuple[str, ...]  # addresses of the targets that the request was on
    audited_by: str


class Progress(Enum):
    """What a verdict means for the audit."""

    GOES_ON = "goes on"
    OPENS_ANEW = "opens anew"
    ENDED = "ended"


def is_repeatable(generation: Generation) -> bool:
    """Whether its text is a function of prompt, parameters and seed alone: under ratio, it is of the drafts too."""
    return generation.sampling.greedy or generation.acceptance is Acceptance.COUPLED


class Replay:
    """An audit from its beginning to its end, wherever it is decided."""

    def __init__(
        self, generation: Generation, committed: tuple[int, ...], served_by: frozenset[str], near_tie: float
    ) -> None:
        self.name = f"audit-{generation.session}"
        self.served_by = served_by
        self.attempt = 0
        self.failures = 0  # targets lost so far
        self.near_ties: list[float] = []  # their margins
        self._generation = generation
        self._committed = committed
        self._near_tie = near_tie
        self._agreed = 0  # committed tokens that stand
        self._plain: tuple[int, ...] = ()  # what plain decoding says from there on, where it is another token
        self._rival: int | None = None  # the token whose margin is asked for
        self._margin: float | None = None
        self._prefix = Prefix(generation.hash_key)  # what the target has

    @property
    def tokens(self) -> int:
        """How many it remembers, prompt included."""
        return len(self._generation.prompt) + len(self._committed)

    @property
    def differs(self) -> bool:
        """Whether there is a difference, though its continuation may not be known yet."""
        return bool(self._plain) and self._rival is None

    def open(self) -> Open:
        """Has a target go on with it, under a new attempt."""
        generation = self._generation
        self.attempt += 1
        tokens = (*generation.prompt, *self._committed[: self._agreed])
        max_len = self.tokens
        if self._rival is not None:
            max_len = len(tokens) + 1
        elif self._plain:
            max_len = self._recorded_len
            tokens += self._plain
        self._prefix = Prefix(generation.hash_key, tokens)
        return Open(
            session=self.name,
            attempt=self.attempt,
            tokens=tokens,
            prompt_len=len(generation.prompt),
            max_len=max_len,
            stop_ids=generation.stop_ids,
            sampling=generation.sampling,
            seed=generation.seed,
            choice=generation.choice,
            hash_key=generation.hash_key,
            acceptance=generation.acceptance,
            max_draft_tokens=0,
            grammar=generation.grammar,
            audit=True,
            rival=self._rival,
            rules=generation.rules,
        )

    def receive(self, verdict: Verdict) -> Progress:
        """Takes what its target decided; what is not of this attempt, or not for these tokens, is void."""
        here = verdict.base_len == self._prefix.length and verdict.prefix_hash == self._prefix.hash
        if verdict.attempt != self.attempt or not here:
            return Progress.GOES_ON
        self._prefix.extend(verdict.tokens)
        if self._rival is not None:
            return self._weigh(verdict, self._rival)
        if self._plain:
            self._plain += verdict.tokens
            return Progress.GOES_ON if verdict.finish is Finish.NONE else Progress.ENDED
        return self._compare(verdict.tokens)

    def difference(self, audited_by: str) -> Difference:
        """What was found; only where it `differs`."""
        generation = self._generation
        return Difference(
            session=generation.session,
            prompt_len=len(generation.prompt),
            position=self._agreed,
            margin=self._margin,
            committed=self._committed[self._agreed : self._agreed + RECORDED_TOKENS],
            plain=self._plain,
            sampling=generation.sampling,
            seed=generation.seed,
            choice=generation.choice,
            acceptance=generation.acceptance,
            max_draft_tokens=generation.max_draft_tokens,
            served_by=tuple(sorted(self.served_by)),
            audited_by=audited_by,
        )

    # ------------------------------------------------------------ helpers

    @property
    def _recorded_len(self) -> int:
        return min(self.tokens, len(self._generation.prompt) + self._agreed + RECORDED_TOKENS)

    def _compare(self, tokens: tuple[int, ...]) -> Progress:
        for token in tokens:
            committed = self._committed[self._agreed]
            if token != committed:
                self._plain = (token,)
                self._rival = committed
                return Progress.OPENS_ANEW
            self._agreed += 1
        return self._ended_or(Progress.GOES_ON)

    def _weigh(self, verdict: Verdict, rival: int) -> Progress:
        """How near it was, by a target that has computed the text before it anew, and as one piece."""
        (token,) = verdict.tokens
        plain = self._plain[0]
        if token == rival and token != plain:  # it is plain decoding that stands alone: how far off is that?
            self._rival = plain
            return Progress.OPENS_ANEW
        self._rival = None
        self._margin = verdict.margin
        if verdict.margin is not None and verdict.margin < self._near_tie:
            self.near_ties.append(verdict.margin)
            self._plain = ()
            self._agreed += 1
            return self._ended_or(Progress.OPENS_ANEW)
        at_end = len(self._generation.prompt) + self._agreed + 1 == self._recorded_len
        is_over = at_end or plain in self._generation.stop_ids
        return Progress.ENDED if is_over else Progress.OPENS_ANEW

    def _ended_or(self, progress: Progress) -> Progress:
        return Progress.ENDED if self._agreed == len(self._committed) else progress
