"""Audits of a router: ended requests are decided again without speculation, and the results are compared.

Input: ended sessions with their committed tokens, and verdicts of idle targets. Output: Open messages for audits,
counts of equal, nearly tied and different results, and an alarm for each difference.

`Replay` is one audit. It decides an ended request again, one token per step, and needs no ledger of its own: until
non-speculative decoding gives another token, its text is a prefix of the committed one, so an audit that had to leave
its target continues elsewhere from there. At another token the audit requests its margin. After a near tie it continues
with the committed token, because only then do both texts agree afterwards. Any other margin is a difference, and the
audit ends after recording how non-speculative decoding continues.

`Audits` selects requests and targets. One audit runs at a time, on a target without other sessions of this router. The
target refuses the audit while it serves other routers' sessions, and ends it as soon as a request arrives; the audit
then waits and continues where it stopped. Callers pass the time in and send the returned messages.
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

RECORDED_TOKENS = 32  # recorded tokens of each continuation, from the difference on
NEAR_TIES: Mapping[str, float] = MappingProxyType({"float32": 2e-3, "float16": 0.06, "bfloat16": 0.5})
"""Logit margins, by dtype, below which a different order of additions may change the choice."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between committed and replayed tokens that no near-tie explains."""

    session: str
    prompt_len: int
    position: int  # index of the first differing token in the answer
    margin: float | None  # lead of the non-speculative token, in logits
    committed: tuple[int, ...]  # committed tokens from that position on; `plain` are the non-speculative ones
    plain: tuple[int, ...]
    sampling: Sampling
    seed: int
    choice: int
    acceptance: Acceptance
    draft_tokens: int
    served_by: tuple[str, ...]  # addresses of the targets that served the request
    audited_by: str


class Progress(Enum):
    """An audit's next action after a verdict."""

    CONTINUES = "continues"
    REOPENS = "reopens"
    ENDED = "ended"


def is_repeatable(generation: Generation) -> bool:
    """Returns True if the text depends only on prompt, parameters and seed.

    Under rejection sampling it depends on drafts.
    """
    return generation.sampling.greedy or generation.acceptance is Acceptance.COUPLED


class Replay:
    """One audit from beginning to end, on one or more targets."""

    def __init__(
        self, generation: Generation, committed: tuple[int, ...], served_by: frozenset[str], near_tie: float
    ) -> None:
        self.name = f"audit-{generation.session}"
        self.served_by = served_by
        self.attempt = 0
        self.failures = 0  # number of targets lost so far
        self.near_ties: list[float] = []  # margins, in logits
        self._generation = generation
        self._committed = committed
        self._near_tie = near_tie
        self._agreed = 0  # number of committed tokens confirmed so far
        self._plain: tuple[int, ...] = ()  # non-speculative tokens after the agreed ones, if they differ
        self._rival: int | None = None  # the token that the next verdict's margin is measured against
        self._margin: float | None = None
        self._prefix = Prefix(generation.hash_key)  # tokens that the target holds

    @property
    def tokens(self) -> int:
        """Number of tokens of the request, prompt and answer."""
        return len(self._generation.prompt) + len(self._committed)

    @property
    def differs(self) -> bool:
        """True if a difference was found, even if its continuation is not recorded yet."""
        return bool(self._plain) and self._rival is None

    def open(self) -> Open:
        """Returns the message that makes a target continue the audit, under a new attempt."""
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
        return replace(
            generation.open_with(tokens, self.attempt),
            session=self.name,
            max_len=max_len,
            draft_tokens=0,
            audit=True,
            rival=self._rival,
        )

    def receive(self, verdict: Verdict) -> Progress:
        """Applies a target's verdict; ignores one for another attempt or other tokens."""
        here = verdict.base_len == self._prefix.length and verdict.prefix_hash == self._prefix.hash
        if verdict.attempt != self.attempt or not here:
            return Progress.CONTINUES
        self._prefix.extend(verdict.tokens)
        if self._rival is not None:
            return self._weigh(verdict, self._rival)
        if self._plain:
            self._plain += verdict.tokens
            return Progress.CONTINUES if verdict.finish is Finish.NONE else Progress.ENDED
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
            draft_tokens=generation.draft_tokens,
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
                return Progress.REOPENS
            self._agreed += 1
        return self._ended_or(Progress.CONTINUES)

    def _weigh(self, verdict: Verdict, rival: int) -> Progress:
        """Decides between a near tie and a difference by the margin, which the target computed over the whole prefix at
        once.
        """
        (token,) = verdict.tokens
        plain = self._plain[0]
        if token == rival and token != plain:  # it agrees with the committed token: measure against the other one
            self._rival = plain
            return Progress.REOPENS
        self._rival = None
        self._margin = verdict.margin
        if verdict.margin is not None and verdict.margin < self._near_tie:
            self.near_ties.append(verdict.margin)
            self._plain = ()
            self._agreed += 1
            return self._ended_or(Progress.REOPENS)
        at_end = len(self._generation.prompt) + self._agreed + 1 == self._recorded_len
        is_over = at_end or plain in self._generation.stop_ids
        return Progress.ENDED if is_over else Progress.REOPENS

    def _ended_or(self, progress: Progress) -> Progress:
        return Progress.ENDED if self._agreed == len(self._committed) else progress


REFUSED_PAUSE_S = 1.0  # pause after a target refused an audit because it had requests to serve
OUTCOMES = ("equal", "near_tie", "differs", "rejection", "dropped", "failed")
"""Outcomes of the chosen requests.

equal, near_tie: the committed text is the target's, without or with near-ties. differs: it is not. rejection: not
audited, because under rejection sampling the text depends on the drafts. dropped: the queue was full. failed: no target
could decide it.
"""


def is_chosen(session: str, share: float) -> bool:
    """Returns True for the given share of all sessions, chosen by a hash of the name."""
    drawn = int.from_bytes(blake2b(session.encode(), digest_size=8).digest())
    return drawn < share * 2**64


class Audits:
    """Queue and results of audits; calls `alarm` for every difference."""

    def __init__(self, config: AuditConfig, dtype: str, alarm: Callable[[Difference], None]) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.widest_near_tie = 0.0  # largest margin of a near-tie, in logits
        self._config = config
        self._near_tie = NEAR_TIES[dtype] if config.near_tie is None else config.near_tie
        self._alarm = alarm
        self._waiting: deque[Replay] = deque()
        self._running: Replay | None = None
        self._target = ""  # target of the running audit
        self._not_before = 0.0  # earliest time of the next try

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
        """Queues an ended request if it is chosen, repeatable, and fits the queue."""
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
        """Starts or continues the first audit for which there is a target without sessions of this router."""
        if self._running is not None or now < self._not_before:
            return []
        for replay in self._waiting:
            if target := targets.spare(replay.served_by):
                self._waiting.remove(replay)
                self._running = replay
                self._target = target
                return [(target, replay.open())]
        return []

    def stop(self) -> list[Send]:
        """Ends all audits, because the router serves no more requests."""
        self.counts["dropped"] += len(self._waiting)
        self._waiting.clear()
        if (replay := self._running) is None:
            return []
        self._give_up(replay, "dropped")
        return [(self._target, Close(replay.name, replay.attempt))]

    # ------------------------------------------------------------ messages from targets

    def receive(self, target: str, message: Message, now: float) -> list[Send]:
        """Handles a message from a target's address if it is about the running audit."""
        replay = self._running
        if replay is None or target != self._target or getattr(message, "session", "") != replay.name:
            return []
        if isinstance(message, Verdict):
            return self._progress(replay, replay.receive(message))
        if isinstance(message, Refusal) and message.attempt == replay.attempt:
            if message.reason is RefusalReason.OVERLOADED:
                self._not_before = now + REFUSED_PAUSE_S
                self._put_back(replay)
            else:
                self._give_up(replay, "failed")
        return []

    def gone(self, target: str) -> None:
        """Handles a target's broken stream.

        Gives an audit up after several broken streams, so that it cannot bring all targets down.
        """
        replay = self._running
        if replay is None or target != self._target:
            return
        replay.failures += 1
        if replay.failures <= MAX_REOPENS:
            self._put_back(replay)
        else:
            self._give_up(replay, "failed")

    def unreadable(self, target: str, session: str) -> list[Send]:
        """Handles a malformed message from a target about a session."""
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

    def _put_back(self, replay: Replay) -> None:
        """Returns an audit to the head of the queue."""
        self._running = None
        self._waiting.appendleft(replay)

    def _give_up(self, replay: Replay, outcome: str) -> None:
        """Ends an audit early; a difference found so far is still reported."""
        self._running = None
        if replay.differs:
            self._note(replay)
        else:
            self.counts[outcome] += 1
