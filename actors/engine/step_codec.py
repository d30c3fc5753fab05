"""Encodes step plans and outcomes as flat 32-bit integers, for the link between a coordinator and its leading rank.

Sessions have slot numbers instead of names, and page tables are appended to: a row carries only pages that differ from
those sent before. `StepEncoder` and `StepDecoder` therefore keep state, and every plan must reach the decoder in order.
Rare parts follow the integers as bytes: new sessions as protobuf, and outcomes with scores or hidden states as pickles.
"""

import pickle
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

from actors.compute.input_row import PageTable
from cluster.page_allocator import PageCopy, SlotMove
from cluster.verification.step import Outcome, Row, StateRead, StepPlan
from protos import speculation_pb2 as pb
from protos.codec import decode, encode
from protos.draft_tree import NO_TREE, DraftTree, SparseProbs
from protos.messages import Open

_KIND = struct.Struct("<BI")  # kind of request, and number of integers
_STEP, _READ = range(2)
_DECIDE, _TREE, _PROBS = 1, 2, 4  # flags of a row
_WHOLE = -1  # number of accepted tokens of an outcome that follows as a pickle
_PATH = 1 << 30  # added to the number of accepted tokens if their nodes follow


def _packed(kind: int, numbers: Sequence[int], rest: bytes = b"") -> bytes:
    return _KIND.pack(kind, len(numbers)) + array("i", numbers).tobytes() + rest


def _unpacked(data: bytes) -> tuple[int, list[int], bytes]:
    kind, count = _KIND.unpack_from(data)
    end = _KIND.size + 4 * count
    return kind, array("i", data[_KIND.size : end]).tolist(), data[end:]


class StepEncoder:
    """Encodes plans and decodes outcomes of the latest plan, on the coordinator."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}  # by session
        self._free: list[int] = []
        self._pages: list[tuple[int, ...]] = []  # page table sent last, by slot
        self._deciding: list[str] = []  # sessions of the latest plan's deciding rows

    def read(self, read: StateRead) -> bytes:
        return _packed(_READ, read.slots)

    def step(self, plan: StepPlan) -> bytes:
        """Returns the request for a plan."""
        closed = [self._slots.pop(name) for name in plan.closes]
        self._free += closed
        numbers = [len(closed), len(plan.opens), len(plan.rows), len(plan.copies), len(plan.moves), *closed]
        numbers += [self._opened(request) for request in plan.opens]
        slots = self._slots
        pages_of = self._pages
        deciding = []
        for row in plan.rows:
            slot = slots[row.session]
            tokens = row.tokens
            draft = row.draft
            pages = row.pages
            sent = pages_of[slot]
            first = len(pages)
            if pages is not sent:
                first = _common(sent, pages)
                pages_of[slot] = pages
            flags = 0
            if row.decide:
                deciding.append(row.session)
                flags = _DECIDE
            if not draft.is_chain:
                flags |= _TREE
            if draft.probs is not None:
                flags |= _PROBS
            numbers += (slot, len(tokens), row.start, flags, len(draft.tokens), first, len(pages), len(row.state_slots))
            numbers += tokens
            if first < len(pages):
                numbers += pages[first:]
            if flags > _DECIDE:
                numbers += _shape(draft)
            if row.state_slots:
                numbers += row.state_slots
        for copy in plan.copies:
            numbers += (copy.source, copy.to)
        for move in plan.moves:
            numbers += (move.source, move.to)
        self._deciding = deciding
        opens = encode(pb.RouterToTarget, plan.opens).SerializeToString() if plan.opens else b""
        return _packed(_STEP, numbers, opens)

    def outcomes(self, data: bytes) -> list[Outcome]:
        """Decodes the answer to the latest plan."""
        _, numbers, rest = _unpacked(data)
        wholes: Iterator[Outcome] = iter(pickle.loads(rest)) if rest else iter(())
        ahead = iter(numbers)
        outcomes = []
        for name in self._deciding:
            accepted = next(ahead)
            if accepted == _WHOLE:
                outcomes.append(next(wholes))
            elif accepted >= _PATH:
                path = tuple(islice(ahead, accepted - _PATH))
                outcomes.append(Outcome(name, path, next(ahead)))
            else:
                outcomes.append(Outcome(name, _CHAIN_PATHS[accepted], next(ahead)))
        return outcomes

    def _opened(self, request: Open) -> int:
        assert request.session not in self._slots, f"session {request.session} is open already"
        slot = self._free.pop() if self._free else len(self._pages)
        if slot == len(self._pages):
            self._pages.append(())
        self._pages[slot] = ()
        self._slots[request.session] = slot
        return slot


_CHAIN_PATHS = [tuple(range(accepted)) for accepted in range(129)]


def _common(sent: tuple[int, ...], pages: tuple[int, ...]) -> int:
    """Returns the number of leading pages that are equal."""
    shorter = min(len(sent), len(pages))
    if sent[:shorter] == pages[:shorter]:
        return shorter
    return next(index for index in range(shorter) if sent[index] != pages[index])


def _shape(draft: DraftTree) -> list[int]:
    """Encodes the parents of a tree's nodes, or the draft distributions of a chain."""
    if draft.probs is None:
        return list(draft.parents)
    ids, weights = draft.probs.token_ids, draft.probs.weights
    return [len(ids[0]), *[number for rows in (ids, weights) for row in rows for number in row]]


class StepDecoder:
    """Decodes requests and encodes outcomes, on the rank."""

    def __init__(self) -> None:
        self._names: list[str] = []  # session by slot
        self._pages: list[PageTable] = []  # page table by slot

    def request(self, data: bytes) -> StepPlan | StateRead:
        """Decodes a request; the state read names no session."""
        kind, numbers, rest = _unpacked(data)
        if kind == _READ:
            return StateRead("", 0, tuple(numbers))
        return self._plan(numbers, rest)

    def _plan(self, numbers: list[int], rest: bytes) -> StepPlan:
        close_count, open_count, row_count, copy_count, move_count = numbers[:5]
        at = 5 + close_count
        closes = tuple([self._names[slot] for slot in numbers[5:at]])
        opens = _opens(rest) if rest else ()
        for slot, request in zip(numbers[at : at + open_count], opens, strict=True):
            if slot == len(self._names):
                self._names.append("")
                self._pages.append(PageTable())
            self._names[slot] = request.session
            self._pages[slot] = PageTable()
        at += open_count
        rows = []
        for _ in range(row_count):
            slot, tokens, start, flags, drafted, first, pages, state_slots = numbers[at : at + 8]
            at += 8
            end = at + tokens
            fed = tuple(numbers[at:end])
            if first < pages or pages != len(self._pages[slot]):
                at = end + pages - first
                self._pages[slot] = self._pages[slot].replace_from(first, numbers[end:at])
            else:
                at = end
            draft = NO_TREE
            if drafted:
                draft, at = _draft(fed[tokens - drafted :], flags, numbers, at)
            slots = tuple(numbers[at : at + state_slots]) if state_slots else ()
            at += state_slots
            rows.append(Row(self._names[slot], fed, start, bool(flags & _DECIDE), self._pages[slot], draft, slots))
        pairs = list(zip(numbers[at::2], numbers[at + 1 :: 2], strict=True))
        assert len(pairs) == copy_count + move_count, "the plan's length differs from its header"
        copies = tuple([PageCopy(*pair) for pair in pairs[:copy_count]])
        return StepPlan(closes, opens, tuple(rows), copies, tuple([SlotMove(*pair) for pair in pairs[copy_count:]]))

    @staticmethod
    def outcomes(outcomes: Sequence[Outcome]) -> bytes:
        """Encodes the outcomes of a plan."""
        numbers: list[int] = []
        wholes = []
        for outcome in outcomes:
            path = outcome.path
            accepted = len(path)
            if not outcome.has_only_tokens:
                numbers.append(_WHOLE)
                wholes.append(outcome)
            elif accepted and path[-1] != accepted - 1:
                numbers += (accepted + _PATH, *path, outcome.next_token)
            else:
                numbers += (accepted, outcome.next_token)
        return _packed(_STEP, numbers, pickle.dumps(wholes, pickle.HIGHEST_PROTOCOL) if wholes else b"")


def _opens(data: bytes) -> tuple[Open, ...]:
    decoded = decode(pb.RouterToTarget.FromString(data))
    assert not decoded.malformed, f"a session cannot be decoded: {decoded.malformed}"
    return tuple([message for message in decoded.messages if isinstance(message, Open)])


def _draft(tokens: tuple[int, ...], flags: int, numbers: list[int], at: int) -> tuple[DraftTree, int]:
    """Decodes a row's draft; returns it with the position after it."""
    count = len(tokens)
    if flags & _TREE:
        return DraftTree(tokens, tuple(numbers[at : at + count])), at + count
    if not flags & _PROBS:
        return DraftTree.chain(tokens), at
    width = numbers[at]
    rows = [tuple(numbers[first : first + width]) for first in range(at + 1, at + 1 + 2 * count * width, width)]
    return DraftTree.chain(tokens, SparseProbs(tuple(rows[:count]), tuple(rows[count:]))), at + 1 + 2 * count * width
