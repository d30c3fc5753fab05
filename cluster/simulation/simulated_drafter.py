"""A simulated drafter: the real scheduler, with a drafting method that asks the oracle and costs time.

The counterpart of `actors/drafter.py`.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from cluster.costs import DraftCost
from cluster.dispatch import Send, stream_name
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import Proposal, Want, max_block_len
from cluster.drafting.scheduler import DraftScheduler
from cluster.simulation.network import Door, Frame, Process, SimulatedLink, Wire
from cluster.simulation.oracle import DraftQuality, Script
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Hello, Open, Shape
from protos.prefix import hashes_after
from protos.values import value

AHEAD_ROWS = 8  # outcomes drafted for together


class OracleMethod:
    """Drafts what the scripts say that the draft model would.

    Ahead, for the likeliest outcomes as `actors.methods.draft_model` does, by the draft model's acceptance.
    """

    def __init__(self, scripts: Mapping[str, Script], draft: DraftQuality) -> None:
        self._scripts = scripts
        self._draft = draft
        self._ranked: dict[int, list[int | None]] = {}  # by length of the block under verification

    @property
    def tokens_per_forward(self) -> int:
        return 1

    def propose(self, wants: Sequence[Want], interrupted: Callable[[], bool], early: Early = dismiss) -> list[Proposal]:
        """At once, as lock step asks; a simulated drafter takes its time over `block` and `ahead`."""
        return [self.block(want) for want in wants]

    def close(self, sessions: Sequence[str]) -> None:
        """It holds nothing of sessions."""

    def block(self, want: Want) -> Proposal:
        """What the draft model says after the tokens of a want that is no guess."""
        name = want.open.session
        base = len(want.tokens)
        script = self._scripts[name]
        assert want.tokens == script.tokens[:base], f"{name}: drafted after tokens that were never decided"
        return Proposal(name, base, want.prefix_hash, self._drafted(want, base, want.max_tokens))

    def ahead(self, want: Want, limit: int) -> list[Proposal]:
        """One block for each of the `limit` likeliest outcomes."""
        found = []
        for place in self._places(len((want.unverified or NO_TREE).trunk))[:limit]:
            outcome = self._outcome(want, place)
            base = len(want.tokens) + len(outcome)
            room = min(want.max_tokens, max_block_len(want.open, base))
            if room > 0:
                tree = self._drafted(want, base, room)
                prefix_hash = hashes_after(want.prefix_hash, outcome)[-1]
                name = want.open.session
                found.append(Proposal(name, base, prefix_hash, tree, outcome))
        return found

    def _drafted(self, want: Want, base: int, room: int) -> DraftTree:
        """A chain from position `base` on, and maybe another token beside its first; `room` tokens in all."""
        script = self._scripts[want.open.session]
        draft = self._draft
        if not draft.branches or want.shape is Shape.CHAIN or room < 2:
            return DraftTree.chain(script.drafted(base, room, draft))
        chain = DraftTree.chain(script.drafted(base, room - 1, draft))
        sibling = script.second_choice(base, draft.acceptance(0), draft)
        return DraftTree((*chain.tokens, sibling), (*chain.parents, -1))

    def _outcome(self, want: Want, place: int | None) -> tuple[int, ...]:
        """The second choice comes at `place` of the block; or all of it is accepted, and the first choice follows."""
        script = self._scripts[want.open.session]
        block = (want.unverified or NO_TREE).trunk
        base = len(want.tokens)
        if place is None:
            return (*block, script.choice(base + len(block), self._draft.acceptance(len(block))))
        siblings = (want.unverified or NO_TREE).children(-1)[1:]
        if place == 0 and siblings:
            return siblings[0], script.choice(base + 1, self._draft.acceptance(0))
        return (*block[:place], script.second_choice(base + place, self._draft.acceptance(place), self._draft))

    def _places(self, block_len: int) -> list[int | None]:
        """Where the second choice may come, likeliest first; None: nowhere."""
        if block_len not in self._ranked:
            self._ranked[block_len] = self._draft.outcomes(block_len)
        return self._ranked[block_len]


@value
class _Due:
    """A block of a pass, and how many of the pass's forwards come before it."""

    proposal: Proposal
    width: int  # tokens that a forward names
    after: int = 0
    until: float = math.inf  # no forward for it begins later

    @property
    def forwards(self) -> int:
        return self.after - (-self.proposal.tree.depth // self.width)

    def cut(self, forwards: int) -> "_Due":
        """As far as so many forwards of the pass bring it; most have no more, so that few need be made anew."""
        if self.forwards <= forwards:
            return self
        whole = self.proposal
        named = self.width * max(0, forwards - self.after)
        return _Due(replace(whole, tree=whole.tree.within(named)), self.width, self.after, self.until)


@value
class _Pass:
    """A drafting pass under way."""

    began_s: float
    per_pass_s: float
    forward_s: float
    blocks: tuple[_Due, ...]
    ahead: bool
    forwards: int  # one after the other; one ahead reads the block under verification with the first

    @property
    def ends_s(self) -> float:
        return self.began_s + self.per_pass_s + self.forwards * self.forward_s

    @property
    def proposals(self) -> list[Proposal]:
        """What there is at the end; ahead, no block is no answer."""
        return [block.proposal for block in self.blocks if block.proposal.tokens or not self.ahead]

    def in_time(self) -> "_Pass":
        """With no forward that ends after the verdict for which it is made, but for the first one."""
        if not self.forward_s or self.ends_s <= min([block.until for block in self.blocks], default=math.inf):
            return self
        made = [self._forwards_by(block.until) for block in self.blocks]
        blocks = tuple([block.cut(forwards) for block, forwards in zip(self.blocks, made, strict=True)])
        left = min(self.forwards, max(made))
        return _Pass(self.began_s, self.per_pass_s, self.forward_s, blocks, self.ahead, left)

    def interrupted(self, now: float) -> "_Pass":
        """It ends after the forward that is under way, with what there is by then; its first one is always made."""
        made = math.ceil((now - self.began_s - self.per_pass_s) / self.forward_s) if self.forward_s else self.forwards
        return self._cut(max(1, made))

    def _forwards_by(self, until: float) -> int:
        if until == math.inf:
            return self.forwards
        return max(1, int((until - self.began_s - self.per_pass_s) / self.forward_s))

    def _cut(self, forwards: int) -> "_Pass":
        blocks = tuple([block.cut(forwards) for block in self.blocks])
        left = min(self.forwards, forwards)
        return _Pass(self.began_s, self.per_pass_s, self.forward_s, blocks, self.ahead, left)


def _after_reading(want: Want, guess: Proposal, width: int) -> _Due:
    """What may follow all of the block under verification is known once that was read."""
    return _Due(guess, width, after=int(len(guess.outcome) > len((want.unverified or NO_TREE).trunk)), until=want.until)


class SimulatedDrafter:
    """The drafting loop. `dial` opens a link to a target, `limit` is the most sessions of one pass."""

    def __init__(
        self,
        process: Process,
        scheduler: DraftScheduler,
        method: OracleMethod,
        cost: DraftCost,
        limit: int,
        dial: Callable[["SimulatedDrafter", str], SimulatedLink],
    ) -> None:
        self.process = process
        self.scheduler = scheduler
        self.busy_s = 0.0
        self._method = method
        self._cost = cost
        self._limit = limit
        self._dial = dial
        self._routers: dict[str, Wire] = {}  # by stream
        self._targets: dict[str, SimulatedLink] = {}  # by address
        self._streams: Counter[str] = Counter()
        self._pass: _Pass | None = None
        self.door = Door(process, self._router_up, self.receive, self._router_down)

    # ------------------------------------------------------------ the loop

    def _go_on(self) -> None:
        """Begins a pass if there is something to draft; what is wanted for sure interrupts drafting ahead."""
        if self._pass is not None:
            if self._pass.ahead and (self.scheduler.has_wants or self.scheduler.is_ahead_vain):
                self._begin(self._pass.interrupted(self.process.clock.now))
            return
        if self.scheduler.take_closed():
            self._drop_unused_targets()
        width = self._cost.tokens_per_forward
        if wants := self.scheduler.wants(self._limit):
            blocks = [_Due(self._method.block(want), width) for want in wants]
            self._begin(self._new_pass(len(wants), blocks, ahead=False))
        elif wants := self.scheduler.wants_ahead(self._limit):
            each = max(1, AHEAD_ROWS // len(wants))
            blocks = [_after_reading(want, guess, width) for want in wants for guess in self._method.ahead(want, each)]
            self._begin(self._new_pass(len(wants), blocks, ahead=True).in_time())

    def _new_pass(self, sessions: int, blocks: Sequence[_Due], ahead: bool) -> _Pass:
        rows = max(sessions, len(blocks))
        process = self.process
        cost = self._cost
        per_pass_s = process.stalls_s + process.slowness * cost.per_pass_s
        longest = max([block.proposal.tree.depth for block in blocks], default=0)
        forward_s = process.slowness * cost.forward_s(rows, longest)
        forwards = max([block.forwards for block in blocks], default=int(ahead))
        return _Pass(process.clock.now, per_pass_s, forward_s, tuple(blocks), ahead, forwards)

    def _begin(self, drafting: _Pass) -> None:
        """Also the same pass anew, with less to do."""
        self._pass = drafting
        self.process.after(drafting.ends_s - self.process.clock.now, partial(self._end, drafting))

    def _end(self, drafting: _Pass) -> None:
        if drafting is not self._pass:
            return  # it was interrupted
        self.busy_s += drafting.ends_s - drafting.began_s
        self._send(self.scheduler.proposed(drafting.proposals, self.process.clock.now))
        self._pass = None
        self.process.after(0.0, self._go_on)  # what arrived meanwhile is heard first

    def _send(self, sends: Sequence[Send]) -> None:
        for receiver, message in sends:
            if wire := self._routers.get(receiver):
                wire.put(message)
            elif link := self._targets.get(receiver):
                link.send(message)

    # ------------------------------------------------------------ streams

    def _router_up(self, hello: Hello, wire: Wire) -> str:
        self._streams[hello.peer_id] += 1
        stream = stream_name(hello.peer_id, self._streams[hello.peer_id])
        self._routers[stream] = wire
        self.scheduler.receive(stream, hello, self.process.clock.now)
        self._go_on()
        return stream

    def receive(self, peer: str, frame: Frame) -> None:
        """What a router or a target has for this drafter at one moment."""
        for message in frame:
            sends = self.scheduler.receive(peer, message, self.process.clock.now)
            if isinstance(message, Open):
                self._connect(message.target_address)
            self._send(sends)
        self._go_on()

    def _router_down(self, stream: str) -> None:
        self.scheduler.gone(stream)
        del self._routers[stream]
        self._go_on()

    def _connect(self, address: str) -> None:
        if address not in self._targets:
            self._targets[address] = self._dial(self, address)

    def _drop_unused_targets(self) -> None:
        for address in sorted(self._targets.keys() - self.scheduler.targets):
            self._targets.pop(address).close()

    def target_up(self, address: str) -> None:
        self._send(self.scheduler.connected(address))
        self._go_on()

    def target_down(self, address: str) -> None:
        self.scheduler.gone(address)
