"""Audits: repeats finished requests without speculation and compares the outputs.

Inputs are finished sessions with their committed tokens, and verdicts from idle targets. Outputs are Open messages for
audits, counts by outcome, and an alarm for each difference.

`Replay` is one audit. It repeats a finished request, one token per step. It needs no ledger: until the first mismatch,
its text is a prefix of the committed text, so an interrupted audit can continue on another target. At a mismatch, the
audit requests the logit margin between the two tokens. After a near tie, it continues with the committed token, so that
both texts have the same prefix again. A larger margin is a difference; the audit records the non-speculative
continuation and ends.

`Audits` selects requests and targets. It runs one audit at a time, on a target that has no other sessions of this
router. The target refuses audits while it serves sessions of other routers, and interrupts an audit when a request
arrives. An interrupted audit resumes later from its last position. Callers pass in the time and send the returned
messages.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from types import MappingProxyType

from cluster.config import AuditConfig
from cluster.envelope import Send
from cluster.routing.ledger import MAX_REOPENS, Generation, Session
from cluster.routing.session_router import Peers
from protos.messages import Acceptance, Close, Finish, Message, Open, Refusal, RefusalReason, Sampling, Verdict
from protos.prefix import Prefix

RECORDED_TOKENS = 32  # tokens recorded per continuation after a difference
NEAR_TIES: Mapping[str, float] = MappingProxyType({"float32": 2e-3, "float16": 0.06, "bfloat16": 0.5})
"""Near-tie thresholds by dtype, in logits: below these margins, summation order can change the chosen token."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A mismatch between committed and replayed tokens with a margin too large for a near tie."""

    session: str
    prompt_len: int
    position: int  # index of the first differing token in the output
    margin: float | None  # lead of the non-speculative token, in logits
    committed: tuple[int, ...]  # committed tokens from `position` on
    plain: tuple[int, ...]
    sampling: Sampling
    seed: int
    choice: int
    acceptance: Acceptance
    draft_tokens: int
    adapter: str
    served_by: tuple[str, ...]  # addresses of the targets that served the request
    audited_by: str


class Progress(Enum):
    """The next action of an audit after a verdict."""

    CONTINUES = "continues"
    REOPENS = "reopens"
    ENDED = "ended"


def is_repeatable(generation: Generation) -> bool:
    """Returns True if the output depends only on prompt, parameters and seed.

    With rejection sampling, the output also depends on the drafts.
    """
    return generation.sampling.greedy or generation.acceptance is Acceptance.COUPLED


class Replay:
    """The state of one audit, which may run on several targets in turn."""

    def __init__(
        self, generation: Generation, committed: tuple[int, ...], served_by: frozenset[str], near_tie: float
    ) -> None:
        self.name = f"audit-{generation.session}"
        self.served_by = served_by
        self.attempt = 0
        self.failures = 0  # number of targets lost so far
        self.near_ties: list[float] = []  # margins of near ties, in logits
        self._generation = generation
        self._committed = committed
        self._near_tie = near_tie
        self._agreed = 0  # number of committed tokens confirmed so far
        self._non_speculative: tuple[int, ...] = ()  # non-speculative tokens from the mismatch on
        self._rival: int | None = None  # token to measure the next verdict's margin against
        self._margin: float | None = None
        self._prefix = Prefix(generation.hash_key)  # tokens that the target holds

    @property
    def tokens(self) -> int:
        """Number of tokens in prompt and output."""
        return len(self._generation.prompt) + len(self._committed)

    @property
    def differs(self) -> bool:
        """True once a difference has been found, even if its continuation is not fully recorded."""
        return bool(self._non_speculative) and self._rival is None

    def open(self) -> Open:
        """Returns the Open that continues the audit on a target, as a new attempt."""
        generation = self._generation
        self.attempt += 1
        tokens = (*generation.prompt, *self._committed[: self._agreed])
        max_len = self.tokens
        if self._rival is not None:
            max_len = len(tokens) + 1
        elif self._non_speculative:
            max_len = self._recorded_len
            tokens += self._non_speculative
        self._prefix = Prefix(generation.hash_key, tokens)
        return replace(
            generation.open_with(tokens, self.attempt),
            session=self.name,
            max_len=max_len,
            draft_tokens=0,
            audit=True,
            rival=self._rival,
        )

    def receive(self, verdict: Verdict) -> Progress:
        """Applies a verdict; ignores it if its attempt, length or hash does not match."""
        here = verdict.base_len == self._prefix.length and verdict.prefix_hash == self._prefix.hash
        if verdict.attempt != self.attempt or not here:
            return Progress.CONTINUES
        self._prefix.extend(verdict.tokens)
        if self._rival is not None:
            return self._weigh(verdict, self._rival)
        if self._non_speculative:
            self._non_speculative += verdict.tokens
            return Progress.CONTINUES if verdict.finish is Finish.NONE else Progress.ENDED
        return self._compare(verdict.tokens)

    def difference(self, audited_by: str) -> Difference:
        """Returns the difference; call this only if `differs` is True."""
        generation = self._generation
        return Difference(
            session=generation.session,
            prompt_len=len(generation.prompt),
            position=self._agreed,
            margin=self._margin,
            committed=self._committed[self._agreed : self._agreed + RECORDED_TOKENS],
            plain=self._non_speculative,
            sampling=generation.sampling,
            seed=generation.seed,
            choice=generation.choice,
            acceptance=generation.acceptance,
            draft_tokens=generation.draft_tokens,
            adapter=generation.adapter,
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
                self._non_speculative = (token,)
                self._rival = committed
                return Progress.REOPENS
            self._agreed += 1
        return self._ended_or(Progress.CONTINUES)

    def _weigh(self, verdict: Verdict, rival: int) -> Progress:
        """Classifies a mismatch as a near tie or a difference by its margin, measured with one pass over the prefix."""
        (token,) = verdict.tokens
        non_speculative = self._non_speculative[0]
        # If it now equals the committed token, measure against the other token.
        if token == rival and token != non_speculative:
            self._rival = non_speculative
            return Progress.REOPENS
        self._rival = None
        self._margin = verdict.margin
        if verdict.margin is not None and verdict.margin < self._near_tie:
            self.near_ties.append(verdict.margin)
            self._non_speculative = ()
            self._agreed += 1
            return self._ended_or(Progress.REOPENS)
        at_end = len(self._generation.prompt) + self._agreed + 1 == self._recorded_len
        is_over = at_end or non_speculative in self._generation.stop_ids
        return Progress.ENDED if is_over else Progress.REOPENS

    def _ended_or(self, progress: Progress) -> Progress:
        return Progress.ENDED if self._agreed == len(self._committed) else progress


REFUSED_PAUSE_S = 1.0  # pause after a busy target refuses an audit
OUTCOMES = ("equal", "near_tie", "differs", "rejection", "dropped", "failed")
"""Outcomes of the selected requests.

equal: the replayed output matches. near_tie: it matches except at near ties. differs: it does not match. rejection: not
audited, because with rejection sampling the output depends on the drafts. dropped: the queue was full or the router
stopped. failed: no target completed the audit.
"""


def is_chosen(session: str, share: float) -> bool:
    """Returns True for the given share of sessions, selected by a hash of the session name."""
    drawn = int.from_bytes(blake2b(session.encode(), digest_size=8).digest())
    return drawn < share * 2**64


class Audits:
    """Queues audits and counts their results; calls `alarm` for every difference.

    With invariant numerics, every mismatch is a difference by default, however small its margin.
    """

    def __init__(
        self, config: AuditConfig, dtype: str, alarm: Callable[[Difference], None], numerics: str = "fast"
    ) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.widest_near_tie = 0.0  # largest near-tie margin, in logits
        self._config = config
        usual = 0.0 if numerics == "invariant" else NEAR_TIES[dtype]
        self._near_tie = usual if config.near_tie is None else config.near_tie
        self._alarm = alarm
        self._waiting: deque[Replay] = deque()
        self._running: Replay | None = None
        self._target = ""  # target of the running audit
        self._not_before = 0.0  # earliest start of the next audit

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def state(self) -> str:
        """Summary of the results: `off`, `ok` or `differs`."""
        if self.counts["differs"]:
            return "differs"
        return "ok" if self._config.share else "off"

    # ------------------------------------------------------------ starting and ending

    def ended(self, session: Session, served_by: frozenset[str]) -> None:
        """Queues an audit of a finished request if the request is selected, repeatable, and fits into the queue."""
        generation = session.generation
        if not is_chosen(generation.session, self._config.share):
            return
        committed = session.committed
        if not committed:
            return
        if not is_repeatable(generation):
            self.counts["rejection"] += 1
            return
        replay = Replay(generation, committed, served_by, self._near_tie)
        tokens = sum(one.tokens for one in self._waiting)
        if len(self._waiting) >= self._config.max_waiting or tokens + replay.tokens > self._config.max_waiting_tokens:
            self.counts["dropped"] += 1
            return
        self._waiting.append(replay)

    def tick(self, targets: Peers, now: float) -> list[Send]:
        """Starts or resumes the first audit that can run on a target without sessions of this router."""
        if self._running is not None or now < self._not_before:
            return []
        for replay in self._waiting:
            if target := targets.idle_replica(replay.served_by):
                self._waiting.remove(replay)
                self._running = replay
                self._target = target
                return [(target, replay.open())]
        return []

    def stop(self) -> list[Send]:
        """Drops all audits when the router stops serving."""
        self.counts["dropped"] += len(self._waiting)
        self._waiting.clear()
        if (replay := self._running) is None:
            return []
        self._give_up(replay, "dropped")
        return [(self._target, Close(replay.name, replay.attempt))]

    # ------------------------------------------------------------ messages from targets

    def receive(self, target: str, message: Message, now: float) -> list[Send]:
        """Handles a target's message if it concerns the running audit."""
        replay = self._running
        if replay is None or target != self._target or getattr(message, "session", "") != replay.name:
            return []
        if isinstance(message, Verdict):
            return self._progress(replay, replay.receive(message))
        if isinstance(message, Refusal) and message.attempt == replay.attempt:
            if message.reason is RefusalReason.OVERLOADED:
                self._not_before = now + REFUSED_PAUSE_S
                self._requeue(replay)
            else:
                self._give_up(replay, "failed")
        return []

    def gone(self, target: str) -> None:
        """Handles a target's broken stream.

        Abandons the audit after several broken streams, so that it cannot crash every target.
        """
        replay = self._running
        if replay is None or target != self._target:
            return
        replay.failures += 1
        if replay.failures <= MAX_REOPENS:
            self._requeue(replay)
        else:
            self._give_up(replay, "failed")

    def unreadable(self, target: str, session: str) -> list[Send]:
        """Handles a malformed message from a target; `session` is the session that it concerns."""
        replay = self._running
        if replay is None or target != self._target or session != replay.name:
            return []
        self.gone(target)
        return [(target, Close(replay.name, replay.attempt))]

    # ------------------------------------------------------------ helpers

    def _progress(self, replay: Replay, progress: Progress) -> list[Send]:
        match progress:
            case Progress.CONTINUES:
                return []
            case Progress.REOPENS:
                return [(self._target, replay.open())]
            case Progress.ENDED:
                self._running = None
                self._note(replay)
                return []

    def _note(self, replay: Replay) -> None:
        self.widest_near_tie = max([self.widest_near_tie, *replay.near_ties])
        if replay.differs:
            self.counts["differs"] += 1
            self._alarm(replay.difference(self._target))
        else:
            self.counts["near_tie" if replay.near_ties else "equal"] += 1

    def _requeue(self, replay: Replay) -> None:
        """Returns an audit to the head of the queue."""
        self._running = None
        self._waiting.appendleft(replay)

    def _give_up(self, replay: Replay, outcome: str) -> None:
        """Ends an audit early, but still reports a difference that was found."""
        self._running = None
        if replay.differs:
            self._note(replay)
        else:
            self.counts[outcome] += 1
