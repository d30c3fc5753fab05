"""How vLLM's workers decide a session's tokens: by the rules, the noise and the scores of the project's own engine.

A request carries its Open in its extra arguments, so that a worker knows of a session what a rank of the own engine
does. Knows nothing of vLLM.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from actors.sampling.logits.makers import chain_of
from actors.sampling.logits.processor import Maker, ProcessorChain
from actors.sampling.margin import margin
from actors.sampling.reference import BlockDecision, DrawAddress
from actors.sampling.rejection_sampler import PendingBlock, decide
from actors.sampling.scoring import decided_scores
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Open
from protos.scores import TokenScore
from protos.values import value

EXTRA_ARG = "slipstream"
Text = Callable[[int, int], Sequence[int]]
"""Tokens of a session from one position to another, all of them decided."""


def extra_args(request: Open) -> dict[str, Any]:
    return {EXTRA_ARG: request}


def request_in(args: Mapping[str, Any] | None) -> Open | None:
    """None of a request that is none of ours, as vLLM makes some to warm up."""
    return (args or {}).get(EXTRA_ARG)


@value
class Told:
    """What a step's outcome says beside the decided tokens, where the session's Open asks for it."""

    scores: tuple[TokenScore, ...] = ()
    margin: float | None = None

    @staticmethod
    def is_asked_by(request: Open) -> bool:
        return request.scoring.top is not None or request.rival is not None


class SessionDraws:
    """One session in one worker."""

    def __init__(self, request: Open, chain: ProcessorChain | None) -> None:
        self.request = request
        self._chain = chain

    @classmethod
    def of(cls, request: Open, makers: tuple[Maker, ...]) -> Self:
        return cls(request, chain_of(request, makers))

    def block(self, length: int, text: Text, drafted: Sequence[int]) -> PendingBlock:
        """What there is to decide after so many tokens about a chain of drafted ones."""
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
) -> tuple[list[BlockDecision], dict[str, Told]]:
    """Decides all blocks, and says of sessions that ask for more what is to be told of them, by session."""
    decisions = decide(blocks, logits)
    asking = [session.request for session in sessions]
    if not any(Told.is_asked_by(request) for request in asking):
        return decisions, {}
    scores = decided_scores(blocks, decisions, [request.scoring.top for request in asking], logits)
    told = {}
    at = 0
    for request, block, score in zip(asking, blocks, scores, strict=True):
        if Told.is_asked_by(request):
            told[request.session] = Told(score, _margin(request, block, logits[at]))
        at += block.positions
    return decisions, told


def _margin(request: Open, block: PendingBlock, logits: Tensor) -> float | None:
    """Of an audit that names a rival."""
    if request.rival is None:
        return None
    return margin(logits, block.sampling, block.chain, block.at, request.rival)
