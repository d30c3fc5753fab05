"""How long the target waits for a block, and what it learns from how blocks fared.

Pure arithmetic over measurements. Knows nothing of sessions, streams or clocks.
"""

from dataclasses import dataclass, replace

PROBE_EVERY = 32  # plain rounds after which a drafter that was written off is waited for once more


@dataclass(frozen=True, slots=True)
class Yield:
    """What a session's blocks have brought, and how long they take to come; decayed means."""

    accepted: float = 1.0  # draft tokens accepted per block
    delay_s: float = 0.0  # from a verdict to the arrival of the next block, in time or not
    vain_rounds: int = 0  # plain rounds since a block last arrived

    def after_block(self, accepted: int) -> "Yield":
        """A block was verified."""
        return replace(self, accepted=0.8 * self.accepted + 0.2 * accepted)

    def after_arrival(self, delay_s: float) -> "Yield":
        """A block came; the drafter lives."""
        return replace(self, delay_s=0.7 * self.delay_s + 0.3 * delay_s, vain_rounds=0)

    def after_plain_round(self) -> "Yield":
        """The target went on without a block."""
        return replace(self, vain_rounds=self.vain_rounds + 1)


@dataclass(frozen=True, slots=True)
class StepCost:
    """A decayed mean of the target's step time."""

    seconds: float = 0.0

    def after_step(self, seconds: float) -> "StepCost":
        return StepCost(seconds if self.seconds == 0.0 else 0.9 * self.seconds + 0.1 * seconds)


def patience_s(blocks: Yield, step: StepCost) -> float:
    """Longest wait for a block that can still pay; 0 when the block is not expected by then.

    With E = 1 + accepted tokens per verify and step time T, a round that waits w yields E tokens in w + T;
    plain decoding yields E tokens in E T. Waiting pays while w < (E - 1) T. Every round in which no block arrives
    at all halves the patience, so that a dead drafter costs a few short waits.
    """
    if blocks.vain_rounds > 0 and blocks.vain_rounds % PROBE_EVERY == 0:
        return step.seconds
    limit = blocks.accepted * step.seconds
    return limit * 0.5**blocks.vain_rounds if blocks.delay_s < limit else 0.0
