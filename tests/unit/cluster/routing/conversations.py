"""Simulates conversations on a pool of targets, with the router's real placement and real page allocators."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.envelope import Send
from cluster.page_allocator import PageAllocator
from cluster.routing.ledger import Generation, Session
from cluster.routing.session_router import Assignment, PrefixOptions, SessionRouter
from protos.messages import Acceptance, Finish, Open, Verdict
from protos.prefix import Prefix
from tests.unit.cluster.samples import GREEDY, KEY

PAGE = 16
SYSTEM_TOKENS = 400
QUESTION_TOKENS = 60
ANSWER_TOKENS = 120
TURNS = 6
ANSWER_STEPS = 12  # steps of a turn on a target
THINKING_STEPS = 8  # mean steps between two turns of a conversation
ARRIVALS = 0.5  # mean new conversations per step


@dataclass
class Conversation:
    tokens: tuple[int, ...]
    turns_left: int = TURNS
    due: int = 0  # step of its next turn


@dataclass
class Outcome:
    """Cache hits and balance of one run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ahead: list[int] = field(default_factory=list)  # session difference of busiest and idlest target, by step
    sessions: list[int] = field(default_factory=list)  # total, by step
    routed: dict[str, int] = field(default_factory=dict)

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class Pool:
    """Pool of targets behind one router."""

    def __init__(self, targets: int, pages: int, options: PrefixOptions, systems: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._systems = [self._text(SYSTEM_TOKENS) for _ in range(systems)]
        self._pages = {f"T{index}": PageAllocator(pages, PAGE, bytes(32)) for index in range(targets)}
        self._router: SessionRouter[Assignment] = SessionRouter("router", 60.0, options)
        for address in self._pages:
            self._router.targets.up(address)
        self._conversations: list[Conversation] = []
        self._running: dict[str, tuple[int, Conversation, Assignment]] = {}  # by session; int: last step of its turn
        self._turns = 0
        self.outcome = Outcome()

    def run(self, steps: int) -> Outcome:
        for step in range(steps):
            while self._draw.random() < ARRIVALS / (1 + ARRIVALS):
                self._conversations.append(Conversation(self._draw.choice(self._systems), due=step))
            for name in [name for name, (ends, _, _) in self._running.items() if ends == step]:
                self._end(name, step)
            for conversation in [one for one in self._conversations if one.due == step]:
                self._ask(conversation, step)
            loads = [self._load(address) for address in self._pages]
            self.outcome.ahead.append(max(loads) - min(loads))
            self.outcome.sessions.append(sum(loads))
        self.outcome.routed = dict(self._router.routed)
        return self.outcome

    def _ask(self, conversation: Conversation, step: int) -> None:
        prompt = conversation.tokens + self._text(QUESTION_TOKENS)
        conversation.due = -1
        name = f"turn{self._turns}"
        self._turns += 1
        length = len(prompt) + ANSWER_TOKENS
        generation = Generation(name, prompt, length, (0,), GREEDY, 7, 8, 0, KEY, Acceptance.COUPLED, 0)
        assignment = Assignment(Session(generation), float(step))
        self._open(self._router.add(assignment, float(step)).sends)
        self._running[name] = (step + ANSWER_STEPS, conversation, assignment)

    def _open(self, sends: list[Send]) -> None:
        for address, message in sends:
            assert isinstance(message, Open)
            pages = self._pages[address]
            prompt = message.tokens
            self.outcome.prompt_tokens += len(prompt)
            cached = pages.open(message.session, prompt)
            self.outcome.cached_tokens += cached
            assert pages.reserve(message.session, cached, message.max_len) is not None, "no target is that full here"
            pages.publish(message.session, prompt, len(prompt))

    def _end(self, name: str, step: int) -> None:
        _, conversation, assignment = self._running.pop(name)
        session = assignment.session
        address = session.target
        assert address is not None
        prompt = session.generation.prompt
        answer = self._text(ANSWER_TOKENS)
        here = Prefix(KEY, prompt)
        verdict = Verdict(name, session.attempt, len(here), here.hash, answer, 0, 0, Finish.LENGTH)
        self._router.receive(address, [verdict], float(step))
        self._router.cancel(assignment)
        pages = self._pages[address]
        pages.publish(name, prompt + answer, len(prompt) + len(answer) - 1)
        pages.close(name)
        conversation.tokens = prompt + answer
        conversation.turns_left -= 1
        if conversation.turns_left:
            conversation.due = step + 1 + int(self._draw.expovariate(1 / THINKING_STEPS))
        else:
            self._conversations.remove(conversation)

    def _load(self, address: str) -> int:
        return sum(assignment.session.target == address for _, _, assignment in self._running.values())

    def _text(self, length: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(1000) for _ in range(length))


def outcomes(targets: int, pages: int, systems: int, seed: int, steps: int = 150) -> Iterator[Outcome]:
    """Runs placement by load alone, and by load and shared prefixes."""
    for max_extra_sessions in (0.0, 4.0):
        yield Pool(targets, pages, PrefixOptions(PAGE, max_extra_sessions), systems, seed).run(steps)
