"""One audit: decides an ended request again, one token per step, and compares the result with the committed tokens.

It needs no ledger of its own. Until non-speculative decoding gives another token, its text is a prefix of the committed
one, so an audit that had to leave its target continues elsewhere from there. At another token the audit asks for its
margin. After a near-tie it continues with the committed token, because only then do both texts go on alike. Any other
margin is a difference, and the audit ends after recording how non-speculative decoding continues.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from cluster.routing.ledger import Generation
from protos.messages import Acceptance, Finish, Open, Sampling, Verdict
from protos.prefix import Prefix

RECORDED_TOKENS = 32  # recorded tokens of each continuation, from the difference on
NEAR_TIES: Mapping[str, float] = MappingProxyType({"float32": 2e-3, "float16": 0.06, "bfloat16": 0.5})
"""Logit margins, by dtype, below which a different order of additions may change the choice."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between committed and replayed tokens that no near-tie explains."""

    session: str
    prompt_len: int
    position: int  # index in the answer of the first token that differs
    margin: float | None  # lead of the token of non-speculative decoding, in logits
    committed: tuple[int, ...]  # tokens from that position on, as are `plain`
    plain: tuple[int, ...]
    sampling: Sampling
    seed: int
    choice: int
    acceptance: Acceptance
    max_draft_tokens: int
    served_by: tuple[str, ...]  # addresses of the targets that served the request
    audited_by: str


class Progress(Enum):
    """State of the audit after a verdict."""

    GOES_ON = "goes on"
    OPENS_ANEW = "opens anew"
    ENDED = "ended"


def is_repeatable(generation: Generation) -> bool:
    """Returns True if the text depends only on prompt, parameters and seed.

    Under rejection sampling it depends on drafts.
    """
    return generation.sampling.greedy or generation.acceptance is Acceptance.COUPLED


class Replay:
    """An audit from beginning to end, on one or more targets."""

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
        self._agreed = 0  # committed tokens confirmed so far
        self._plain: tuple[int, ...] = ()  # tokens of non-speculative decoding from there on, if they differ
        self._rival: int | None = None  # the token that the next verdict's margin is measured against
        self._margin: float | None = None
        self._prefix = Prefix(generation.hash_key)  # tokens that the target has

    @property
    def tokens(self) -> int:
        """Number of tokens held, prompt included."""
        return len(self._generation.prompt) + len(self._committed)

    @property
    def differs(self) -> bool:
        """True if a difference was found, even if its continuation is not recorded yet."""
        return bool(self._plain) and self._rival is None

    def open(self) -> Open:
        """Returns the message that has a target continue the audit, under a new attempt."""
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
        """Applies a target's verdict; ignores one of another attempt or for other tokens."""
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
        """Returns the difference that was found; call it only if `differs`."""
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
        """Judges the margin, as computed by a target that has recomputed the preceding text as one piece."""
        (token,) = verdict.tokens
        plain = self._plain[0]
        if token == rival and token != plain:  # it agrees with the committed token: measure the other one
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
