"""What vLLM's workers are told of a session, so that they draw its tokens as the project's own engine does.

It travels in a request's extra arguments, as a plain mapping. Knows nothing of vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from actors.sampling.reference import DrawAddress
from actors.sampling.rejection_sampler import PendingBlock
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Open, Sampling
from protos.values import value

EXTRA_ARG = "slipstream"


@value
class DrawTerms:
    """How a session's tokens are drawn."""

    sampling: Sampling
    seed: int
    choice: int
    prompt_len: int  # of the client's prompt: what was committed elsewhere follows it

    @classmethod
    def of(cls, request: Open) -> Self:
        return cls(request.sampling, request.seed, request.choice, request.prompt_len)

    def extra_args(self) -> dict[str, Any]:
        sampling = {name: getattr(self.sampling, name) for name in Sampling.__dataclass_fields__}
        told = {"sampling": sampling, "seed": self.seed, "choice": self.choice, "prompt_len": self.prompt_len}
        return {EXTRA_ARG: told}

    @classmethod
    def from_extra_args(cls, args: Mapping[str, Any] | None) -> Self | None:
        """None of a request that is none of ours, as vLLM makes some to warm up."""
        told = (args or {}).get(EXTRA_ARG)
        return None if told is None else cls(Sampling(**told["sampling"]), *[told[name] for name in _NUMBERS])

    def block(self, tokens: Sequence[int], drafted: Sequence[int]) -> PendingBlock:
        """What there is to decide after `tokens`, all that is decided so far, about a chain of drafted ones."""
        return self.block_after(len(tokens), tokens[self.prompt_len :] if self.sampling.penalised else (), drafted)

    def block_after(self, length: int, generated: Sequence[int], drafted: Sequence[int]) -> PendingBlock:
        """The same after so many tokens; only penalties look at the generated ones."""
        return PendingBlock(
            rule=Acceptance.COUPLED,
            sampling=self.sampling,
            draft=DraftTree.chain(tuple(drafted)),
            generated=generated,
            at=DrawAddress(self.seed, self.choice, length),
        )


_NUMBERS = ("seed", "choice", "prompt_len")
