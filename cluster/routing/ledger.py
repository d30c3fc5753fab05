"""Ledger of one session: committed tokens, target and drafter, and recovery when these fail.

Methods take events and return commands; nothing here waits, sends or reads a clock. The ledger guarantees these rules:

* only verdicts of the current attempt, at exactly the ledger's length and hash, are committed;
* committed tokens are never revoked, and the ledger suffices to open the session on any replica;
* a lost drafter only reduces speed; a lost target starts a new attempt, at most twice without progress in between;
* a planned shutdown of a target also starts a new attempt, but never counts as a loss.

It is independent of text, streams, and the choice of peers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from cluster.errors import NonFiniteLogitsError, RequestError, SlipstreamError, TargetLostError
from cluster.learning import Source
from cluster.trust import issue
from protos.frozen import value
from protos.messages import (
    NO_RULES,
    NO_SCORING,
    Acceptance,
    Close,
    DraftAnswer,
    Finish,
    Message,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    Sampling,
    Scoring,
    TokenRules,
    TokenScore,
    Verdict,
)
from protos.prefix import Prefix

MAX_REOPENS = 2  # a request that crashes targets must not crash all of them
# Number of tokens after a loss that clears the request of having caused it. A request that crashes a target by its
# content or length does so again within a few tokens.
PROGRESS_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Generation:
    """Generation parameters of a session, with all defaults resolved."""

    session: str
    prompt: tuple[int, ...]
    max_len: int
    stop_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    draft_seed: int  # independent of `seed`; for drafters under rejection sampling
    choice: int
    hash_key: int
    acceptance: Acceptance
    draft_tokens: int
    traceparent: str = ""  # W3C trace context of the parent span; empty: not traced
    grammar: str = ""  # as in `Open`
    rules: TokenRules = NO_RULES
    scoring: Scoring = NO_SCORING
    priority: int = 0
    cache_salt: str = ""
    wants_rejected: bool = False  # include rejected draft tokens in `CommittedTokens`
    model: str = ""  # name of the model, for drafters that serve several
    adapter: str = ""  # name of the model's LoRA adapter; empty: none
    draft_prompt: tuple[int, ...] = ()  # as in `Open`
    learn_from: Source | None = None  # source of the training example; None: the session becomes no example

    def open_with(self, tokens: Sequence[int], attempt: int) -> Open:
        """Returns an Open that continues after `tokens`, with only the parameters that affect the output."""
        return Open(
            session=self.session,
            attempt=attempt,
            tokens=tuple(tokens),
            prompt_len=len(self.prompt),
            max_len=self.max_len,
            stop_ids=self.stop_ids,
            sampling=self.sampling,
            seed=self.seed,
            choice=self.choice,
            hash_key=self.hash_key,
            acceptance=self.acceptance,
            draft_tokens=self.draft_tokens,
            grammar=self.grammar,
            rules=self.rules,
            adapter=self.adapter,
        )


@value
class ToTarget:
    """Command to send a message to the target at `address`."""

    address: str
    message: Open | Close


@value
class ToDrafter:
    """Command to send a message to the drafter at `address`."""

    address: str
    message: Open | Close


@value
class CommittedTokens:
    """Newly committed tokens for the client; the first `accepted` of them are draft tokens."""

    tokens: tuple[int, ...]
    accepted: int
    drafted: int  # number of tokens in the verified block
    scores: tuple[TokenScore, ...] = ()  # scores of `tokens`, if requested
    prompt_scores: tuple[TokenScore, ...] = ()  # scores of the prompt from its second token; only with the first tokens
    cached: int = 0  # number of cached prompt tokens; only with the first tokens
    rejected: tuple[int, ...] = ()  # draft tokens after the accepted ones, if requested


@value
class Ended:
    """The session has ended normally."""

    finish: Finish


@value
class Failed:
    """The session cannot continue."""

    error: SlipstreamError


Event = CommittedTokens | Ended | Failed
"""Events of a session for its client."""

Command = ToTarget | ToDrafter | Event


class Phase(Enum):
    SEEKING = "seeking"  # waiting for a target
    RUNNING = "running"
    DONE = "done"


@dataclass
class Counts:
    """Verification totals of a session."""

    verifies: int = 0  # number of committed verdicts
    blocks: int = 0  # number of committed verdicts with a block
    drafted: int = 0
    accepted: int = 0
    void: int = 0  # number of ignored verdicts


class Session:
    """State machine of a session's ledger."""

    def __init__(self, generation: Generation, token_key: bytes = b"") -> None:
        """Creates a session. `token_key` is a secret key for assignment tokens; without it, any drafter may draft."""
        self.generation = generation
        self._token_key = token_key
        self._drafters = 0  # number of drafter assignments
        self.phase = Phase.SEEKING
        self.attempt = 0
        self.failures = 0  # consecutive lost targets without progress in between
        self._lost_at = 0  # ledger length at the latest loss, in tokens
        self.target: str | None = None
        self.drafter: str | None = None
        self.has_drafted = False  # True after the drafter's first answer in time
        self.failed_targets: frozenset[str] = frozenset()
        self.drafts = generation.draft_tokens > 0
        self.counts = Counts()
        self._prefix = Prefix(generation.hash_key, generation.prompt)

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and committed tokens."""
        return self._prefix.tokens

    @property
    def committed(self) -> tuple[int, ...]:
        return tuple(self._prefix.tokens[len(self.generation.prompt) :])

    @property
    def wants_drafter(self) -> bool:
        running = self.phase is Phase.RUNNING
        return running and self.drafter is None and self.drafts

    # ------------------------------------------------------------ assignment

    def assign_target(self, address: str) -> list[Command]:
        """Opens the session on a target as a new attempt, and reopens it on its drafter."""
        assert self.phase is Phase.SEEKING
        self.phase = Phase.RUNNING
        self.target = address
        self.attempt = self.attempt + 1
        return [ToTarget(address, self._open()), *self._open_drafter()]

    def assign_drafter(self, address: str) -> list[Command]:
        """Opens the session on a new drafter."""
        assert self.wants_drafter
        self.drafter = address
        self._drafters += 1
        self.has_drafted = False
        return self._open_drafter()

    def leave_drafter(self) -> list[Command]:
        """Releases a live drafter; another may then be assigned."""
        assert self.drafter is not None
        left = self.drafter
        self.drafter = None
        return [ToDrafter(left, Close(self.generation.session, self.attempt))]

    def leave_target(self) -> list[Command]:
        """Releases a live target that will shut down; another must then be assigned."""
        assert self.phase is Phase.RUNNING
        assert self.target is not None
        left = self.target
        self.phase = Phase.SEEKING
        self.target = None
        return [ToTarget(left, Close(self.generation.session, self.attempt))]

    def receive(self, peer: str, message: Message) -> list[Command]:
        """Handles a message from the session's target or drafter."""
        match message:
            case Verdict():
                return self.on_verdict(peer, message)
            case Resync():
                return self.on_drafter_resync(peer)
            case Refusal() if peer == self.target:
                return self.on_target_refusal(peer, message)
            case Refusal():
                return self.on_drafter_refusal(peer, message)
        raise AssertionError(f"a router never receives a {type(message).__name__}")

    def on_verdict(self, source: str, verdict: Verdict) -> list[Command]:
        """Commits a verdict if attempt, length and hash match; counts other verdicts as void."""
        current = self.phase is Phase.RUNNING and verdict.attempt == self.attempt and source == self.target
        here = verdict.base_len == self._prefix.length and verdict.prefix_hash == self._prefix.hash
        if not (current and here and verdict.tokens):
            self.counts.void += 1
            return []
        prompt_len = len(self.generation.prompt)
        is_first = self._prefix.length == prompt_len
        self._prefix.extend(verdict.tokens)
        self.counts.verifies += 1
        self.counts.blocks += verdict.drafted > 0
        self.counts.drafted += verdict.drafted
        self.counts.accepted += verdict.accepted
        if self.drafter is not None:
            self.has_drafted |= verdict.answer is DraftAnswer.GIVEN
        cached = min(verdict.prefix_cached, prompt_len) if is_first else 0
        commands: list[Command] = [
            CommittedTokens(
                verdict.tokens,
                verdict.accepted,
                verdict.drafted,
                verdict.scores,
                verdict.prompt_scores,
                cached,
                rejected=verdict.rejected,
            )
        ]
        if verdict.finish is not Finish.NONE:
            commands += [*self._release(), Ended(verdict.finish)]
        return commands

    def on_drafter_resync(self, source: str) -> list[Command]:
        """Reopens the session on a drafter whose tokens contradict the target's."""
        return self._open_drafter() if source == self.drafter else []

    def on_drafter_gone(self, source: str) -> list[Command]:
        """Removes a lost drafter; the target continues without one until another is assigned."""
        if source == self.drafter:
            self.drafter = None
        return []

    def on_drafter_refusal(self, source: str, refusal: Refusal) -> list[Command]:
        """Releases the drafter; ends speculation if the drafter rejected the request as invalid."""
        if source == self.drafter and refusal.reason is RefusalReason.INVALID:
            self.drafts = False
        if source != self.drafter:
            return []
        return self.leave_drafter()  # the drafter may have accepted a newer Open that crossed its refusal

    def on_target_gone(self, source: str, is_planned: bool = False) -> list[Command]:
        """Handles the end of a target's stream. The session avoids a lost target, and fails after too many losses
        without progress.

        A long request that makes progress can survive any number of losses.
        """
        if self.phase is not Phase.RUNNING or source != self.target:
            return []
        self.phase = Phase.SEEKING
        self.target = None
        if is_planned:
            return []
        self.failed_targets |= {source}
        here = self._prefix.length
        self.failures = self.failures + 1 if here < self._lost_at + PROGRESS_TOKENS else 1
        self._lost_at = here
        if self.failures <= MAX_REOPENS:
            return []
        lost = TargetLostError(f"{self.failures} target replicas in a row failed on this request; see their logs")
        return [*self._release(), Failed(lost)]

    def on_target_unreadable(self, source: str, attempt: int) -> list[Command]:
        """Handles a malformed message from the target: closes the session there and counts the target as lost."""
        if self.phase is not Phase.RUNNING or source != self.target or attempt != self.attempt:
            return []
        return [ToTarget(source, Close(self.generation.session, attempt)), *self.on_target_gone(source)]

    def on_target_refusal(self, source: str, refusal: Refusal) -> list[Command]:
        """Seeks another target if the target is full; otherwise fails the session."""
        if source != self.target or refusal.attempt != self.attempt:
            return []
        self.target = None
        if refusal.reason is RefusalReason.OVERLOADED:
            self.phase = Phase.SEEKING  # not a failure: another target, or the same one later, can accept the session
            return []
        is_nonfinite = refusal.reason is RefusalReason.NONFINITE_LOGITS
        error = NonFiniteLogitsError(refusal.message) if is_nonfinite else RequestError(refusal.message)
        return [*self._release(), Failed(error)]

    def cancel(self) -> list[Command]:
        """Ends a session that is no longer wanted."""
        return self._release()

    def fail(self, error: SlipstreamError) -> list[Command]:
        """Fails the session with `error` unless it has ended."""
        return [*self._release(), Failed(error)] if self.phase is not Phase.DONE else []

    # ------------------------------------------------------------ helpers

    def _open(self) -> Open:
        generation = self.generation
        scoring = generation.scoring
        if self.committed:  # prompt scores came with the first tokens; computing them again would bypass the cache
            scoring = replace(scoring, prompt_top=None)
        return replace(
            generation.open_with(self.tokens, self.attempt),
            token_key=self._token_key,
            traceparent=generation.traceparent,
            scoring=scoring,
            priority=generation.priority,
            cache_salt=generation.cache_salt,
            wants_rejected=generation.wants_rejected,
        )

    def _open_drafter(self) -> list[Command]:
        if self.drafter is None or self.target is None:
            return []
        generation = self.generation
        issued = issue(self._token_key, generation.session, self._drafters) if self._token_key else None
        request = replace(
            generation.open_with(self.tokens, self.attempt),
            seed=generation.seed if generation.acceptance is Acceptance.COUPLED else generation.draft_seed,
            target_address=self.target,
            model=generation.model,
            assignment_token=issued,
            traceparent=generation.traceparent,
            cache_salt=generation.cache_salt,
            may_learn=generation.learn_from is not None,
            draft_prompt=generation.draft_prompt,
        )
        return [ToDrafter(self.drafter, request)]

    def _release(self) -> list[Command]:
        """Closes the session on both peers; idempotent."""
        self.phase = Phase.DONE
        close = Close(self.generation.session, self.attempt)
        commands: list[Command] = []
        if self.target is not None:
            commands.append(ToTarget(self.target, close))
        if self.drafter is not None:
            commands.append(ToDrafter(self.drafter, close))
        self.target = self.drafter = None
        return commands
