"""What drafters' blocks have brought, and what to expect of the next ones.

Immutable values that each round makes anew; of many parts, for few of them change at once.
"""

import math
from itertools import islice, zip_longest

from cluster.pacing.draft_delay import DraftDelay
from protos.values import value

FIRST_PAUSE = 16  # rounds without drafts before they are tried again; doubles while they do not pay
LONGEST_PAUSE = 512
TRIED_ONE_IN = 100  # of all sessions' rounds, for all share what trials cost
MEMORY = 0.06  # weight of the latest block in a session's chances
KEPT = 1 - MEMORY  # that of all before it
REPLICA_STRENGTH = 3.0  # blocks that a guess counts for, before anything is known
SESSION_STRENGTH = 8.0  # blocks that what others' blocks brought counts for, before a session's own
ALARM = 1e-4  # false alarms a block, at most, while blocks are about as good as usual
PROOF = 8  # blocks that must have been good before, or there is no history to fall short of
HISTORY = 128  # blocks, about, from which it is known what is usual
POOR = 0.25  # usual acceptance below which there is nothing to fall from
HARDER = 0.85  # of the usual acceptance: what texts that become harder are granted
COLLAPSED = 0.15  # of that: what is left to a drafter that is out of step
CONCLUSIVE = -math.log(ALARM)  # evidence at which it is taken for that
POSITIONS = 16  # of a block, that are told apart
PRIOR = tuple(0.5**position for position in range(1, POSITIONS + 1))


@value
class Chances:
    """How often each position of a block was asked for, was drafted, and was accepted; decayed counts.

    They go as far as was ever asked for, which is a few positions for most sessions; blocks may end in doubt.
    """

    asked: tuple[float, ...] = ()
    drafted: tuple[float, ...] = ()  # of as many positions, and so below
    accepted: tuple[float, ...] = ()

    def after(self, asked: int, drafted: int, accepted: int) -> "Chances":
        """A block was verified. What was not asked for for long is forgotten, and so is tried again."""
        new = (0.0,) * (min(asked, POSITIONS) - len(self.asked))
        return Chances(
            _counted(self.asked + new, asked),
            _counted(self.drafted + new, drafted),
            _counted(self.accepted + new, accepted),
        )

    def outlook(self, others: "Chances", positions: int) -> list[tuple[float, float, float]]:
        """What to expect of the first positions of the next block: one triple for each.

        The chance that its token is accepted, and all before it; how far luck alone may have moved that, for a few
        rejections in a row prove nothing; and the chance that it is drafted at all. `others` is what all sessions'
        blocks brought, for where little is known.
        """
        counts = others.asked, others.drafted, others.accepted, self.asked, self.drafted, self.accepted
        seen = islice(zip_longest(PRIOR, *counts, fillvalue=0.0), min(positions, POSITIONS))
        found = []
        for prior, o_asked, o_drafted, o_accepted, asked, drafted, accepted in seen:
            usual = REPLICA_STRENGTH + o_asked
            blocks = SESSION_STRENGTH + asked
            p_accepted = (SESSION_STRENGTH * ((REPLICA_STRENGTH * prior + o_accepted) / usual) + accepted) / blocks
            p_drafted = (SESSION_STRENGTH * ((REPLICA_STRENGTH + o_drafted) / usual) + drafted) / blocks
            found.append((p_accepted, math.sqrt(p_accepted * (1 - p_accepted) / blocks), p_drafted))
        return found


def _counted(counts: tuple[float, ...], positions: int) -> tuple[float, ...]:
    """Decayed, and one more for each of the first `positions`."""
    return tuple([KEPT * count + (index < positions) for index, count in enumerate(counts)])


@value
class Arrivals:
    """How a session's blocks come."""

    delay_s: float = 0.0  # from a verdict to the arrival of the next block, when it was not there already; decayed
    hits: float = 0.5  # share of verdicts after which a block was there already; decayed
    missed_rounds: int = 0  # plain rounds since a block last arrived
    unawaited: int = 0  # rounds in a row for whose blocks nobody would have waited

    def asked_for(self, waits: bool) -> "Arrivals":
        """One was asked for; `waits`: and is worth waiting for."""
        if waits and self.unawaited == 0:
            return self
        return Arrivals(self.delay_s, self.hits, self.missed_rounds, 0 if waits else self.unawaited + 1)


@value
class AcceptanceDrift:
    """Whether a drafter's blocks are as good as they were: Page's CUSUM test against the session's own history.

    A block is good if anything of it was accepted. `evidence` is the logarithm of how much likelier the latest blocks
    are if blocks are good COLLAPSED * HARDER as often as usual than if HARDER as often; it never falls below 0. At
    -log(ALARM) a collapse is concluded. If it were known exactly what is usual, there would be 1 / ALARM blocks or more
    on average before a false alarm, as long as blocks are good at least HARDER as often (Lorden 1971). It is estimated;
    simulated sessions keep to that rate at every constant acceptance: 0.2 comes closest, with 9e-5 alarms a block in
    the first hundred, and from 0.8 on there is less than one in a million. A fall from 0.8 to 0.1 is found after 12
    blocks, one to 0.2 after 17 (medians).
    """

    proven: float = 0.0  # blocks of the history of which something was accepted; decayed beyond HISTORY
    failed: float = 0.0  # and of which nothing was
    evidence: float = 0.0

    def after(self, accepted: int) -> "AcceptanceDrift":
        """A block was verified. While there is evidence it is no part of the history: a collapse is not usual."""
        good = accepted > 0
        evidence = self._evidence_after(good)
        if self.evidence:
            return AcceptanceDrift(self.proven, self.failed, evidence)
        kept = 1.0 if self.proven + self.failed < HISTORY else 1 - 1 / HISTORY
        return AcceptanceDrift(kept * self.proven + good, kept * self.failed + (not good), evidence)

    def _evidence_after(self, good: bool) -> float:
        usual = (self.proven + 0.5) / (self.proven + self.failed + 1)
        if self.proven < PROOF or usual < POOR:
            return 0.0
        if good:
            return max(0.0, self.evidence + math.log(COLLAPSED))
        harder = HARDER * usual
        return self.evidence + math.log((1 - COLLAPSED * harder) / (1 - harder))


@value
class Trials:
    """For how long drafts are left off that do not pay, and how the trials go that are made now and then."""

    paused: int = 0  # rounds for which nothing was asked for
    pause: int = FIRST_PAUSE  # rounds after which to try again
    rounds: int = 0  # of the trial that is on since then, or since something was accepted in it; 0: none has begun

    @property
    def is_on(self) -> bool:
        """Whether blocks are asked for only to see whether they would pay by now."""
        return self.paused >= self.pause

    def after_pause(self) -> "Trials":
        """A round passed for which nothing was asked for."""
        return Trials(self.paused + 1, self.pause, self.rounds)

    def after_round(self) -> "Trials":
        """A block is asked for to see what becomes of it."""
        return Trials(self.paused, self.pause, self.rounds + 1)

    def after_success(self) -> "Trials":
        """Something was accepted."""
        return Trials(self.paused, self.pause, 1) if self.rounds else self

    def after_failure(self) -> "Trials":
        """A trial brought nothing."""
        return Trials(1, min(2 * self.pause, LONGEST_PAUSE))


PAYING = Trials()


@value
class ReplicaStats:
    """What all sessions of a replica have shown, for what little is known of one."""

    chances: Chances = Chances()
    too_soon: int = 0  # rounds of any sessions before the next trial may begin
    delay: DraftDelay = DraftDelay()  # of blocks that were not there already

    def after_block(self, asked: int, drafted: int, accepted: int) -> "ReplicaStats":
        """A block was verified."""
        return ReplicaStats(self.chances.after(asked, drafted, accepted), self.too_soon, self.delay)

    def after_round(self, is_trial: bool) -> "ReplicaStats":
        """A session was decided about."""
        if is_trial:
            return ReplicaStats(self.chances, self.too_soon + TRIED_ONE_IN, self.delay)
        return ReplicaStats(self.chances, self.too_soon - 1, self.delay) if self.too_soon else self

    def with_delay(self, delay: DraftDelay) -> "ReplicaStats":
        """Blocks take another time now."""
        return ReplicaStats(self.chances, self.too_soon, delay)

    def after_arrival(self, tokens: int, delay_s: float) -> "ReplicaStats":
        """A block of so many tokens came, so long after the verdict that asked for it."""
        return ReplicaStats(self.chances, self.too_soon, self.delay.after(tokens, delay_s))


@value
class SessionStats:
    """What a session's blocks have brought, and how they come.

    Of parts, because few of them change at once, and some value changes several times in each round.
    """

    chances: Chances = Chances()  # of a block's tokens
    arrivals: Arrivals = Arrivals()
    drift: AcceptanceDrift = AcceptanceDrift()
    trials: Trials = PAYING

    def after_block(self, asked: int, drafted: int, accepted: int) -> "SessionStats":
        """A block was verified."""
        return SessionStats(
            self.chances.after(asked, drafted, accepted),
            self.arrivals,
            self.drift.after(accepted),
            self.trials.after_success() if accepted else self.trials,
        )

    def after_nothing(self, asked: int) -> "SessionStats":
        """The drafter had no block to offer: as good as one of which nothing was accepted, but no sign of decay."""
        return SessionStats(self.chances.after(asked, 0, 0), self.arrivals, self.drift, self.trials)

    def after_arrival(self, delay_s: float) -> "SessionStats":
        """A block came, or word that there is none; the drafter lives."""
        seen = self.arrivals
        return self._coming(Arrivals(0.7 * seen.delay_s + 0.3 * delay_s, seen.hits, 0, seen.unawaited))

    def after_verdict(self, hit: bool) -> "SessionStats":
        """A verdict went out that asked for a block; `hit`: it was there already."""
        seen = self.arrivals
        if hit:
            return self._coming(Arrivals(seen.delay_s, 0.9 * seen.hits + 0.1, 0, seen.unawaited))
        return self._coming(Arrivals(seen.delay_s, 0.9 * seen.hits, seen.missed_rounds, seen.unawaited))

    def after_plain_round(self) -> "SessionStats":
        """The target went on without a block."""
        seen = self.arrivals
        return self._coming(Arrivals(seen.delay_s, seen.hits, seen.missed_rounds + 1, seen.unawaited))

    def after_paying(self, waits: bool) -> "SessionStats":
        """Drafting was found to pay, and a block is asked for; `waits`: and is worth waiting for."""
        arrivals = self.arrivals.asked_for(waits)
        if arrivals is self.arrivals and self.trials == PAYING:
            return self
        return SessionStats(self.chances, arrivals, self.drift, PAYING)

    def after_losing(self, trials: Trials) -> "SessionStats":
        """Drafting was found not to pay; `trials`: what is done about it."""
        return SessionStats(self.chances, self.arrivals, self.drift, trials)

    def after_trial(self) -> "SessionStats":
        """A block is asked for that should not pay; it is waited for whatever became of those before it."""
        seen = self.arrivals
        arrivals = Arrivals(seen.delay_s, seen.hits, 0, seen.unawaited)
        return SessionStats(self.chances, arrivals, self.drift, self.trials.after_round())

    def after_alarm(self) -> "SessionStats":
        """The drafter was told to begin anew."""
        return SessionStats(self.chances, self.arrivals, AcceptanceDrift(), self.trials)

    def _coming(self, arrivals: Arrivals) -> "SessionStats":
        return SessionStats(self.chances, arrivals, self.drift, self.trials)


def out_of_step(blocks: SessionStats) -> bool:
    """Whether a drafter's blocks are good so much more seldom than before that its state must be wrong."""
    return blocks.drift.evidence >= CONCLUSIVE
