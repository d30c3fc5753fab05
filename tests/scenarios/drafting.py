"""Runs transcripts of conversations with a drafter's scheduler.

Each line is an event and, after `->`, the scheduler's answer; two or more answers follow on indented lines:

    router#1: Open s 1,2 -> t1 <- Attach s 1,2
    draft -> s 1,2 max_tokens=4
    block s 1,2 :5,6 -> t1 <- Block s 1,2 :5,6
    t1: Step s 1,2 +5,7

`s` is a session and `1,2` its text, which messages carry as a length and a hash. `:5,6` are draft tokens and `+5,7`
are decided tokens. `name=value` sets a field; other fields have the defaults of `an_open` and of the message. Events:

* `peer: Message ...` delivers a message; a Step combines a Verdict and the DraftRequest for the text after it, and
  `States s 5,6,7 1` contains the hidden states of that text from position 1 on;
* `connected peer` and `gone peer` report the state of a stream, and `at 0.5` sets the time;
* `draft [limit]`, `ahead [limit]` and `pass` start a pass; answers list sessions closed, states received, blocks
  requested;
* `exchange 3` loads version 3 of the method's weights;
* `block` returns a drafted block; with `outcome=...`, the block follows the assumed tokens;
* `show name ...` reads counters and properties of the scheduler.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cluster.drafting.hidden_state_receiver import StateBounds
from cluster.drafting.requests import LookaheadRequest, Proposal
from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.session_table import DrafterLimits
from protos.draft_tree import MAX_BLOCK_TOKENS, DraftTree
from protos.messages import (
    AssignmentToken,
    Attach,
    Block,
    Close,
    DraftAnswer,
    DraftRequest,
    Finish,
    Hello,
    LiveSession,
    Message,
    NoDraft,
    Refusal,
    Resync,
    Shape,
    StateDtype,
    States,
    StatesAck,
    StatesFormat,
    Verdict,
)
from protos.prefix import Prefix
from tests.scenarios.transcript import Tokens, check, read_event, read_tokens, written
from tests.unit.cluster.samples import KEY, an_open

LIMITS = DrafterLimits(vocabulary=50, max_context=100, max_sessions=3)
STATES = StatesFormat(2, StateDtype.BFLOAT16)  # for States events; each row repeats its token

FIELDS: dict[str, Callable[[str], Any]] = {
    "accepted": int,
    "answer": lambda word: DraftAnswer[word.upper()],
    "assignment_token": lambda word: AssignmentToken(int(word), b"proof"),
    "attempt": int,
    "confidence": float,
    "drafted": int,
    "finish": lambda word: Finish[word.upper()],
    "hold_step": lambda word: word == "yes",
    "least_chance": float,
    "max_len": int,
    "max_tokens": int,
    "model": str,
    "outcome": read_tokens,
    "shape": lambda word: Shape[word.upper()],
    "target_address": str,
}
REQUEST_FIELDS = {"max_tokens", "hold_step", "least_chance", "shape"}


def rows_of(tokens: Tokens) -> bytes:
    return b"".join(bytes([token]) * STATES.row_bytes for token in tokens)


class Drafter:
    """Drafter scheduler, with the texts that its drafting method knows."""

    def __init__(
        self,
        draft_ahead: bool = False,
        states: StatesFormat | None = None,
        bounds: StateBounds = LIMITS.state_bounds,
        **options: Any,
    ) -> None:
        limits = replace(LIMITS, states=states, state_bounds=bounds)
        self.scheduler = DraftScheduler(limits, draft_ahead, **options)
        self.now = 0.0
        self._texts: dict[str, Tokens] = {}
        self._by_address: dict[tuple[int, int], Tokens] = {}  # texts in earlier events, by length and hash

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
                sends = self.scheduler.gone(peer)
            case ["exchange", version]:
                self.scheduler.exchanged(int(version), None)
                return []
            case ["connected", peer]:
                sends = self.scheduler.connected(peer)
            case ["draft", *limit]:
                return self._pass(int(limit[0]) if limit else 9, 0)
            case ["ahead", *limit]:
                return self._pass(0, int(limit[0]) if limit else 9)
            case ["pass"]:
                return self._pass(9, 9)
            case ["block", session, text, *drafted]:
                tree = DraftTree.chain(read_tokens("".join(drafted).lstrip(":")))
                address = self.address(read_tokens(text))
                sends = self.scheduler.proposed([Proposal(session, *address, tree, **fields)], self.now)
            case ["show", *names]:
                return [" ".join(f"{name}={self._shown(name)}" for name in names)]
            case [peer, kind, *arguments]:
                sends = [
                    send
                    for message in self._messages(kind, arguments, fields)
                    for send in self.scheduler.receive(peer.removesuffix(":"), message, self.now)
                ]
        return [self._sent(*send) for send in sends]

    def address(self, text: Tokens) -> tuple[int, int]:
        """Returns the length and hash that identify a text in messages."""
        address = len(text), Prefix(KEY, text).hash
        self._by_address[address] = text
        return address

    def _messages(self, kind: str, arguments: list[str], fields: dict[str, Any]) -> list[Message]:
        if kind == "Hello":
            return [Hello("router", "", "", tuple(LiveSession(session, 1) for session in arguments))]
        session, *texts = arguments
        text, new = [read_tokens(each.lstrip("+")) for each in (*texts, "", "")[:2]]
        if kind == "Open":
            self.address(text)
            return [an_open(session, **{"tokens": text, "target_address": "t1"} | fields)]
        if kind == "States":
            (first,) = new
            _, prefix_hash = self.address(text)
            rows = rows_of(text[first:])
            return [replace(States(session, first, prefix_hash, STATES.dtype, STATES.width, rows), **fields)]
        if kind == "Step":
            requested = {name: fields.pop(name) for name in REQUEST_FIELDS & fields.keys()}
            verdict = Verdict(session, 1, *self.address(text), new, 0, 0)
            request = DraftRequest(session, 1, *self.address(text + new), **requested)
            return [replace(verdict, **fields), request]
        plain: dict[str, Message] = {
            "Close": Close(session, 1),
            "DraftRequest": DraftRequest(session, 1, *self.address(text)),
            "Resync": Resync(session, *self.address(text)),
            "Verdict": Verdict(session, 1, *self.address(text), new, 0, 0),
        }
        return [replace(plain[kind], **fields)]

    def _pass(self, limit: int, lookahead_limit: int) -> list[str]:
        drafting = self.scheduler.next_pass(limit, lookahead_limit)
        for session in drafting.updates.closed:
            self._texts.pop(session, None)
        self._texts |= {name: request.tokens for name, request in drafting.updates.opened.items()}
        for session, tokens in drafting.updates.committed.items():
            self._texts[session] += tuple(tokens)
        answers = [f"closed {session}" for session in drafting.updates.closed]
        for session, (first, rows) in drafting.updates.states.items():
            data = b"".join(rows)
            end = first + len(data) // STATES.row_bytes
            assert data == rows_of(self._texts[session][first:end]), "states of another text"
            answers.append(f"states {session} {first}-{end}")
        return answers + [self._requested(each) for each in drafting.requests or drafting.lookahead]

    def _requested(self, request: DraftRequest | LookaheadRequest) -> str:
        text = self._texts[request.session]
        assert self.address(text) == (request.base_len, request.prefix_hash)
        words = [request.session, written(text)]
        if isinstance(request, DraftRequest) and request.attempt != 1:
            words.append(f"attempt={request.attempt}")
        if isinstance(request, LookaheadRequest):
            words.append(f"unverified={written(request.unverified.tokens)}")
        if request.max_tokens < MAX_BLOCK_TOKENS:
            words.append(f"max_tokens={request.max_tokens}")
        if request.least_chance:
            words.append(f"least_chance={request.least_chance}")
        if request.shape is Shape.TREE:
            words.append("shape=tree")
        if isinstance(request, LookaheadRequest) and request.until < float("inf"):
            words.append(f"until={request.until:.3f}")
        return " ".join(words)

    def _sent(self, peer: str, message: Message) -> str:
        words = [peer, "<-", type(message).__name__, getattr(message, "session", "")]
        match message:
            case Attach():
                words.append(written(self._by_address[message.have_len, message.have_hash]))
                for name in ("states_from", "states_by"):
                    if (position := getattr(message, name)) is not None:
                        words.append(f"{name}={position}")
                if message.assignment_token is not None:
                    assert message.assignment_token.proof == b"proof"
                    words.append(f"assignment_token={message.assignment_token.assignment}")
            case Resync():
                words.append(written(self._by_address[message.have_len, message.have_hash]))
            case StatesAck():
                words.append(str(message.have_len))
            case Block() | NoDraft():
                words.append(written(self._by_address[message.base_len, message.prefix_hash]))
                if isinstance(message, Block):
                    assert message.tree == DraftTree.chain(message.tree.tokens)
                    words.append(f":{written(message.tree.tokens)}")
            case Refusal():
                words += [f"attempt={message.attempt}", message.reason.name.lower(), f'"{message.message}"']
        return " ".join(words)

    def _shown(self, name: str) -> str:
        match name:
            case "sessions":
                return f"{self.scheduler.load()[name]:.0f}"
            case "targets":
                return ",".join(sorted(self.scheduler.targets))
            case "has_requests" | "is_idle" | "is_lookahead_stale":
                return "yes" if getattr(self.scheduler, name) else "no"
            case "checked" | "correct":
                check = self.scheduler.sessions.load_check
                return str(check.tokens if name == "checked" else check.accepted)
            case "version" | "judged" | "acceptance" | "acceptance_before":
                found = self.scheduler.sessions.version_watch.summary()["blocks" if name == "judged" else name]
                return "none" if found is None else f"{found:g}"
        return str(self.scheduler.counts[name])
