"""How long the target waits for a block, and what it learns from how blocks fared.

Pure arithmetic over measurements. Knows nothing of sessions, streams or clocks.
"""

from dataclasses import dataclass

PROBE_EVERY = 32  # plain rounds after which a drafter that was written off is waited for once more


@dataclass(frozen=True, slots=True)
class Yield:
    """What waiting for a session's blocks has brought: a decayed mean of accepted tokens per wait.

    A wait in vain counts as nothing accepted, so patience with a dead or useless drafter fades within a few
    rounds instead of being paid for ever.
    """

    accepted: float = 1.0
    vain_rounds: int = 0  # plain rounds in a row

    def after_block(self, accepted: int) -> "Yield":
        return Yield(0.8 * self.accepted + 0.2 * accepted)

    def after_vain_wait(self) -> "Yield":
        return Yield(0.5 * self.accepted, self.vain_rounds + 1)


@dataclass(frozen=True, slots=True)
class StepCost:
    """A decayed mean of the target's step time."""

    seconds: float = 0.0

    def after_step(self, seconds: float) -> "StepCost":
        return StepCost(seconds if self.seconds == 0.0 else 0.9 * self.seconds + 0.1 * seconds)


def patience_s(blocks: Yield, step: StepCost) -> float:
    """Longest wait for a block that can still pay.

    With E = 1 + accepted tokens per verify and step time T, a round that waits w yields E tokens in w + T;
    plain decoding yields E tokens in E T. Waiting pays while w < (E - 1) T.
    """
    if blocks.vain_rounds >= PROBE_EVERY and blocks.vain_rounds % PROBE_EVERY == 0:
        return step.seconds
    return blocks.accepted * step.seconds
