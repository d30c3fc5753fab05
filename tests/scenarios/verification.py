"""Runs transcripts of conversations with a target's scheduler, on an engine that checks every page it reads.

Each line is an event and, after `->`, the scheduler's answer; two or more answers follow on indented lines:

    router#1: Open s 1,2
    drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
    drafter#1: Block s 1,2 :23,9
    plan -> row s@0 1,2 :23,9
    apply
        drafter#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=2 answer=given
        drafter#1 <- DraftRequest s 1,2,23,35 max_tokens=4
        router#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=2 answer=given

`s` is a session and `1,2` its text, which messages carry as a length and a hash. `:23,9` are draft tokens (a tree
appends the parents: `:23,9/-1,-1`), and `+23,35` are decided tokens. `s@0` is a row that begins at position 0.
Assignment tokens have the form `key/session/number`. Answers omit fields with default values. Events:

* `peer: Message ...` delivers a message, `gone peer` breaks a stream, and `at 0.5` sets the time;
* `plan` begins a step and lists the engine's work; `apply` ends it; `step` does both and lists the messages;
* `leave` begins the replica's planned departure, and `end` returns the remaining sessions;
* `due` reads the time of the scheduler's next call;
* `show name ...` reads counters and properties of the scheduler.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.envelope import Send
from cluster.speculation.controller import DraftingDecision, ExpectedBlock, PacingPolicy
from cluster.speculation.estimators import DraftValue, Load
from cluster.trust import issue
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from cluster.verification.step import Outcome, Row, StepPlan
from protos.draft_tree import DraftTree
from protos.messages import (
    Acceptance,
    AssignmentToken,
    Attach,
    Close,
    Detach,
    DraftAnswer,
    DraftRequest,
    Finish,
    Hello,
    LiveSession,
    Message,
    NoDraft,
    Refusal,
    RefusalReason,
    Resync,
    Sampling,
    Shape,
    Verdict,
)
from protos.prefix import Prefix
from tests.scenarios.transcript import Tokens, check, read_event, read_tokens, written
from tests.unit.cluster.samples import KEY, a_block, an_open
from tests.unit.cluster.token_memory import TokenMemory

VOCABULARY = 50
LIMITS = VerificationLimits(VOCABULARY, max_context=100, max_sessions=4, max_step_tokens=64, pages=100, page_size=4)
ROUTER = "router#1"
DRAFTER = "drafter#1"


def next_token(tokens: Sequence[int]) -> int:
    """Returns the test model's next token after a text."""
    return (sum(tokens) * 7 + len(tokens)) % VOCABULARY


def text(prompt: Tokens, count: int) -> Tokens:
    """Returns the tokens that non-speculative decoding adds to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


@dataclass
class Steady:
    """Speculation control with one draft length, several in turn, or the longest allowed; records its statistics."""

    patience: float = 0.0
    hold: float = 0.0
    asked: int | Iterator[int] | None = None
    waits: bool = True
    seen: list[tuple[DraftValue, Load]] = field(default_factory=list)

    def decide(self, drafts: DraftValue, limit: int, load: Load, now: float) -> DraftingDecision:
        self.seen.append((replace(drafts), load))
        tokens = next(self.asked) if isinstance(self.asked, Iterator) else self.asked
        wanted = limit if tokens is None else tokens
        return DraftingDecision(wanted, hold_step=self.waits, skip_for_s=self.patience)

    def hold_for_s(self, expected: Sequence[ExpectedBlock], load: Load) -> float:
        return self.hold


class Target:
    """Target scheduler with an engine that checks each plan against a simulated page cache."""

    def __init__(
        self,
        patience: float = 0.0,
        hold: float = 0.0,
        asked: int | Iterator[int] | None = None,
        waits: bool = True,
        policy: PacingPolicy | None = None,
        **limits: Any,
    ) -> None:
        self.limits = replace(LIMITS, **limits)
        self.steady = Steady(patience, hold, asked, waits)
        self.scheduler = VerificationScheduler(self.limits, policy or self.steady)
        self.now = 0.0
        self.known: dict[str, list[int]] = {}  # the engine's text of each session
        self.rows: list[tuple[Row, ...]] = []  # rows of every step
        self.memory = TokenMemory(self.limits.page_size)
        self._plan: StepPlan | None = None
        self._prompts: list[Tokens] = []  # prompts of all opened sessions

    def open(self, session: str = "s", router: str = ROUTER, **changes: Any) -> list[Send]:
        return self.scheduler.receive(router, an_open(session, **changes), self.now)

    def attach(self, tokens: tuple[int, ...], session: str = "s", drafter: str = DRAFTER) -> list[Send]:
        return self.scheduler.receive(drafter, Attach(session, len(tokens), Prefix(KEY, tokens).hash), self.now)

    def block(self, before: tuple[int, ...], tokens: tuple[int, ...] | DraftTree, session: str = "s") -> None:
        self.scheduler.receive(DRAFTER, a_block(before, tokens, session), self.now)

    def close(self, session: str = "s", router: str = ROUTER) -> None:
        self.scheduler.receive(router, Close(session, 1), self.now)

    def step(self) -> list[Send]:
        plan = self.scheduler.plan(self.now)
        assert plan is not None, "nothing was due"
        return self.scheduler.apply(self.compute(plan), 0.1, self.now)

    def compute(self, plan: StepPlan) -> list[Outcome]:
        for name in plan.closes:
            del self.known[name]
        for request in plan.opens:
            assert request.session not in self.known
            self.known[request.session] = list(request.tokens)
        assert len({row.session for row in plan.rows}) == len(plan.rows) <= self.limits.max_sessions
        assert sum(len(row.tokens) for row in plan.rows) <= self.limits.max_step_tokens
        self.rows.append(plan.rows)
        self.memory.move(plan.moves)
        self.memory.copy(plan.copies)
        for row in plan.rows:
            assert row.tokens
            assert max(row.pages) < self.limits.pages
            self.memory.write(row.tokens, row.start, row.pages)
        return [outcome for row in plan.rows if (outcome := self._run(row)) is not None]

    def _run(self, row: Row) -> Outcome | None:
        """Decides a row from its pages after all rows are written, so wrong writes become visible."""
        known = self.known[row.session]
        cached = self.memory.read(row.start + len(row.tokens), row.pages)
        assert row.start <= len(known), "a row begins beyond what is known of its session"
        base = row.base_len
        known[row.start : base] = row.tokens[: row.known]
        assert cached == (*known[:base], *row.draft.tokens), "the pages hold another text than the session's"
        if not row.decide:
            return None
        del known[base:]
        path: list[int] = []
        while (node := self._child(row, path, next_token(tuple(known)))) is not None:
            path.append(node)
            known.append(row.draft.tokens[node])
        assert len(known) == base + len(path)
        return Outcome(row.session, tuple(path), next_token(tuple(known)))

    def _child(self, row: Row, path: list[int], token: int) -> int | None:
        """Returns the child of this path with the given token."""
        parent = path[-1] if path else -1
        nodes = enumerate(zip(row.draft.parents, row.draft.tokens, strict=True))
        return next((node for node, child in nodes if child == (parent, token)), None)

    @property
    def dropped(self) -> Counter[str]:
        """Returns the causes of dropped blocks."""
        return +self.scheduler.counts.dropped

    def finish(self) -> dict[str, tuple[int, ...]]:
        """Steps until all sessions end; returns their tokens."""
        got: dict[str, tuple[int, ...]] = {}
        for _ in range(2000):
            plan = self.scheduler.plan(self.now)
            if plan is None:
                break
            for receiver, message in self.scheduler.apply(self.compute(plan), 0.1, self.now):
                if receiver == ROUTER:
                    assert isinstance(message, Verdict)
                    got[message.session] = got.get(message.session, ()) + message.tokens
        assert self.scheduler.is_idle
        self.scheduler.admission.pages.check()
        assert not self.known, "the engine still remembers a session"
        return got

    # ------------------------------------------------------------ transcripts

    def run(self, transcript: str) -> None:
        """Runs the events of a transcript and compares the answers."""
        check(transcript, self.do)

    def do(self, event: str) -> list[str]:
        """Runs one event and returns the answers."""
        words, fields = read_event(event, FIELDS)
        match words:
            case ["at", now]:
                self.now = float(now)
                return []
            case ["gone", peer]:
                self.scheduler.gone(peer, self.now)
                return []
            case ["leave"]:
                sends = self.scheduler.leave()
            case ["end"]:
                sends = self.scheduler.refuse_rest()
            case ["due"]:
                due = self.scheduler.next_due()
                return ["never" if due is None else f"{due:g}"]
            case ["plan"]:
                self._plan = self.scheduler.plan(self.now)
                return ["nothing"] if self._plan is None else self._planned(self._plan)
            case ["apply"]:
                assert self._plan is not None
                sends = self.scheduler.apply(self.compute(self._plan), 0.1, self.now)
            case ["step"]:
                sends = self.step()
            case ["show", *names]:
                return [" ".join(f"{name}={self._shown(name)}" for name in names)]
            case [peer, kind, *arguments]:
                message = self._message(kind, arguments, fields)
                sends = self.scheduler.receive(peer.removesuffix(":"), message, self.now)
        return [self._sent(*send) for send in sends]

    def _message(self, kind: str, arguments: list[str], fields: dict[str, Any]) -> Message:
        if kind == "Hello":
            pairs = (live.partition("/") for live in arguments)
            return Hello("router", "", "", tuple(LiveSession(name, int(attempt or 1)) for name, _, attempt in pairs))
        session, *rest = arguments
        tokens = read_tokens(rest[0]) if rest else ()
        address = len(tokens), Prefix(KEY, tokens).hash
        if kind == "Open":
            self._prompts.append(tokens)
        messages: dict[str, Callable[[], Message]] = {
            "Attach": lambda: Attach(session, *address),
            "Block": lambda: a_block(tokens, read_tree(rest[1]), session),
            "Close": lambda: Close(session, 1),
            "Detach": lambda: Detach(session),
            "NoDraft": lambda: NoDraft(session, *address),
            "Open": lambda: an_open(session, tokens=tokens),
        }
        return replace(messages[kind](), **fields)

    def _planned(self, plan: StepPlan) -> list[str]:
        opened = [f"open {request.session}" for request in plan.opens]
        rows = []
        for row in plan.rows:
            draft = row.draft.tokens
            known = row.tokens[: len(row.tokens) - len(draft)]
            words = ["row" if row.decide else "chunk", f"{row.session}@{row.start}", written(known)]
            rows.append(" ".join([*words, f":{written(draft)}"] if draft else words))
        moves = [f"move {move.source} to {move.to}" for move in plan.moves]
        copies = [f"copy page {copy.source} to {copy.to}" for copy in plan.copies]
        return [f"close {session}" for session in plan.closes] + opened + moves + copies + rows

    def _sent(self, peer: str, message: Message) -> str:
        words = [peer, "<-", type(message).__name__, getattr(message, "session", "")]
        match message:
            case Verdict():
                words += [self._text_at(message.session, message.base_len, message.prefix_hash)]
                words.append(f"+{written(message.tokens)}")
                words += [f"{name}={value}" for name in ("accepted", "drafted") if (value := getattr(message, name))]
                words += ["finish=" + message.finish.name.lower()] if message.finish is not Finish.NONE else []
                words += (
                    ["answer=" + message.answer.name.lower()] if message.answer is not DraftAnswer.NOT_ASKED else []
                )
                words += ["rejected=" + written(message.rejected)] if message.rejected else []
                words += [f"cached={message.prefix_cached}"] if message.prefix_cached else []
            case DraftRequest():
                words += [self._text_at(message.session, message.base_len, message.prefix_hash)]
                words.append(f"max_tokens={message.max_tokens}")
                words += [] if message.hold_step else ["hold_step=no"]
                words += ["shape=chain"] if message.shape is Shape.CHAIN else []
            case Resync():
                words.append(self._text_at(message.session, message.have_len, message.have_hash))
            case Refusal():
                words += [message.reason.name.lower(), f'"{message.message}"']
        attempt = getattr(message, "attempt", 1)
        words += [f"attempt={attempt}"] if attempt != 1 else []
        return " ".join(word for word in words if word)

    def _text_at(self, session: str, length: int, prefix_hash: int) -> str:
        """Returns the text with this length and hash, among opened prompts and the model's continuations."""
        for prompt in self._prompts:
            tokens = prompt + text(prompt, max(0, length - len(prompt)))
            if len(tokens) == length and Prefix(KEY, tokens).hash == prefix_hash:
                return written(tokens)
        raise AssertionError(f"no text of {session} has length {length} and this hash")

    def _shown(self, name: str) -> str:
        scheduler = self.scheduler
        match name:
            case "sessions" | "queued":
                return f"{scheduler.load()[name]:.0f}"
            case "dropped" | "refusals":
                counts = self.dropped if name == "dropped" else scheduler.refusals.counts
                return ",".join(f"{cause}:{count}" for cause, count in sorted(counts.items())) or "none"
            case "is_idle" | "has_left":
                return "yes" if (scheduler.is_idle if name == "is_idle" else scheduler.has_left) else "no"
            case "acceptance":
                return str(scheduler.controller.acceptance)
            case "preempted":
                return str(scheduler.admission.preempted)
            case "idle_s" | "step_s":
                return f"{getattr(scheduler.counts, name):g}"
        return str(getattr(scheduler.counts if hasattr(scheduler.counts, name) else scheduler, name))


def read_assignment_token(word: str) -> AssignmentToken | None:
    """Parses `key/session/number`, `none` or `zeros`; a fourth part replaces the issued number."""
    if word in ("none", "zeros"):
        return AssignmentToken(0, bytes(16)) if word == "zeros" else None
    key, session, number, *shown = word.split("/")
    token = issue(key.encode(), session, int(number))
    return replace(token, assignment=int(shown[0])) if shown else token


def read_sampling(word: str) -> Sampling:
    """Parses a temperature, followed by further parameters as `,name=value`."""
    temperature, *others = word.split(",")
    return Sampling(float(temperature), **{name: float(number) for name, number in (o.split("=") for o in others)})


FIELDS: dict[str, Callable[[str], Any]] = {
    "adapter": str,
    "acceptance": lambda word: Acceptance[word.upper()],
    "assignment_token": read_assignment_token,
    "attempt": int,
    "base_len": int,
    "audit": lambda word: word == "yes",
    "draft_tokens": int,
    "have_hash": int,
    "max_len": int,
    "prefix_hash": int,
    "priority": int,
    "rival": int,
    "sampling": read_sampling,
    "stop_ids": read_tokens,
    "token_key": str.encode,
    "wants_rejected": lambda word: word == "yes",
}


def read_tree(word: str) -> DraftTree:
    tokens, _, parents = word.removeprefix(":").partition("/")
    return DraftTree(read_tokens(tokens), read_tokens(parents)) if parents else DraftTree.chain(read_tokens(tokens))


def only_verdict(sends: list[Send], receiver: str = ROUTER) -> Verdict:
    """Returns the receiver's verdict, which must be its only message except for a request."""
    (verdict,) = (message for to, message in sends if to == receiver and not isinstance(message, DraftRequest))
    assert isinstance(verdict, Verdict)
    return verdict


def refusals(sends: list[Send]) -> list[tuple[str, str, RefusalReason]]:
    """Returns receiver, session and reason of each refusal."""
    return [(to, m.session, m.reason) for to, m in sends if isinstance(m, Refusal)]
