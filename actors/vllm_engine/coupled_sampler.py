"""Samples tokens in vLLM's workers with the rules, noise and scores of our own engine.

A request's extra arguments contain its Open, so a worker has the same session data as a rank of our engine. `fed_row`
and `outcome_of` convert vLLM's scheduled and sampled tokens to rows and outcomes of the verification scheduler. This
module uses no vLLM types.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from actors.sampling.acceptance import BlockDecision, DrawAddress, PendingBlock, decide
from actors.sampling.logits_processors import ProcessorChain, ProcessorFactory, chain_of
from actors.sampling.scoring import decided_scores, margin
from cluster.verification.step import Outcome, Row
from protos.draft_tree import NO_TREE, DraftTree
from protos.frozen import value
from protos.messages import Acceptance, Open, TokenScore

EXTRA_ARG = "slipstream"
Text = Callable[[int, int], Sequence[int]]
"""Returns a session's committed tokens between two positions."""


def extra_args(request: Open) -> dict[str, Any]:
    return {EXTRA_ARG: request}


def request_in(args: Mapping[str, Any] | None) -> Open | None:
    """Returns the Open in a request's extra arguments; None for vLLM's own requests, such as warm-up requests."""
    return (args or {}).get(EXTRA_ARG)


@value
class ExtraResults:
    """Scores and margin of one session in one step, if its Open requests them."""

    scores: tuple[TokenScore, ...] = ()
    margin: float | None = None

    @staticmethod
    def is_requested_by(request: Open) -> bool:
        return request.scoring.top is not None or request.rival is not None


@value
class FedBlock:
    """Last rows of a request in a step: its last committed token, then its draft."""

    length: int  # committed tokens
    drafted: tuple[int, ...]


class SessionDraws:
    """Samples the tokens of one session in one worker."""

    def __init__(self, request: Open, chain: ProcessorChain | None) -> None:
        self.request = request
        self._chain = chain

    @classmethod
    def of(cls, request: Open, processor_factories: tuple[ProcessorFactory, ...]) -> Self:
        return cls(request, chain_of(request, processor_factories))

    def block(self, length: int, text: Text, drafted: Sequence[int]) -> PendingBlock:
        """Returns a block to decide: a chain of draft tokens after the session's first `length` tokens."""
        if self._chain is not None:
            self._chain.advance(text(self._chain.length, length))
        return PendingBlock(
            rule=Acceptance.COUPLED,
            sampling=self.request.sampling,
            draft=DraftTree.chain(tuple(drafted)),
            chain=self._chain,
            at=DrawAddress(self.request.seed, self.request.choice, length),
        )


def decide_all(
    sessions: Sequence[SessionDraws], blocks: Sequence[PendingBlock], logits: Tensor
) -> tuple[list[BlockDecision], dict[str, ExtraResults]]:
    """Decides all blocks; also returns the requested extra results, by session."""
    decisions = decide(blocks, logits)
    requests = [session.request for session in sessions]
    if not any(ExtraResults.is_requested_by(request) for request in requests):
        return decisions, {}
    scores = decided_scores(blocks, decisions, [request.scoring.top for request in requests], logits)
    extra_results = {}
    at = 0
    for request, block, score in zip(requests, blocks, scores, strict=True):
        if ExtraResults.is_requested_by(request):
            extra_results[request.session] = ExtraResults(score, _margin(request, block, logits[at]))
        at += block.positions
    return decisions, extra_results


def _margin(request: Open, block: PendingBlock, logits: Tensor) -> float | None:
    """Returns the margin against an audit's rival token; None without an audit."""
    if request.rival is None:
        return None
    return margin(logits, block.sampling, block.chain, block.at, request.rival)


def fed_row(planned: Row, tokens: Sequence[int], start: int, scheduled: int, drafted: int) -> Row:
    """Returns the fed part of a planned row: `scheduled` tokens from `start`, of which the last `drafted` are draft
    tokens.

    `tokens` are all committed tokens of the session. The part differs from the plan because vLLM splits prompts into
    chunks and recomputes preempted requests. Hidden states are requested at the planned row's slots, except slots of
    drafts that were not fed.
    """
    committed = scheduled - drafted
    end = start + committed
    assert end <= len(tokens), f"{planned.session} was fed {end} tokens, {len(tokens)} are decided"
    assert not drafted or end == len(tokens), f"{planned.session} was fed a draft in the middle of its text"
    draft = planned.draft.first(drafted) if drafted else NO_TREE
    decides = end == len(tokens)
    state_slots = planned.state_slots[: len(planned.state_slots) - planned.drafted + drafted] if decides else ()
    fed = (*tokens[start:end], *draft.tokens)
    return Row(planned.session, fed, start, decides, planned.pages, draft, state_slots)


def outcome_of(row: Row, sampled: Sequence[int], is_finite: bool = True) -> Outcome | None:
    """Returns a row's outcome: the accepted draft tokens and one further token; None if the row only fed a prompt.

    If the row's logits are NaN or infinite, `sampled` is undefined.
    """
    if not row.decide:
        return None
    if not is_finite:
        return Outcome(row.session, (), 0, is_finite=False)
    accepted = len(sampled) - 1
    draft = row.draft.tokens
    assert 0 <= accepted <= len(draft), f"{row.session}: {len(sampled)} tokens returned for a draft of {len(draft)}"
    assert tuple(sampled[:-1]) == draft[:accepted], f"{row.session}: accepted tokens that were not drafted"
    return Outcome(row.session, tuple(range(accepted)), sampled[-1])
