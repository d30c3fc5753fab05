"""Applies the two acceptance rules to all blocks of a step on the logits' device, with one copy to the host.

Both rules are exact, and greedy decoding is a special case of each. Decisions ignore stop ids; the scheduler cuts the
text after one.

* Gumbel coupling (`coupled`): the target draws every position itself, as argmax(logits + Gumbel noise), with the same
  noise as the drafter. A draft token is accepted if it equals the target's own draw. In a tree, acceptance walks from
  the root to the child that equals the target's draw, and so on. The output depends only on prefix, parameters and seed
  (Daliri et al. 2024, arXiv 2408.07978).
  When the host needs no logits of a step, the step accepts draft tokens itself (`draws.mark_reached`), and
  `decided_in_step` reads the result. Otherwise, `match` applies the same rule on the host.
* Rejection sampling (`rejection`): a draft token x is accepted with probability min(1, target_probs[x] /
  draft_probs[x]). After a rejection, the recovered token is drawn from the normalized max(target_probs - draft_probs,
  0) (Leviathan et al. 2023, arXiv 2211.17192). A draft token without probabilities counts as a point mass. Supports
  only chains.

`cluster/verification/block_buffer.py` counts blocks that are dropped before verification, such as late ones.
`tests/sampling_reference.py` is a simpler implementation for single blocks; tests require equal results.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise

import torch
from torch import Tensor

from actors.compute.kv_cache import to_device
from actors.sampling.draws import LOGITS_PER_GROUP, NOT_FINITE, Draws, DrawsOnDevice, draw_tokens
from actors.sampling.gumbel import Purpose, gumbel_argmaxes, gumbel_argmaxes_among, key, keys, uniform_scalar
from actors.sampling.logits_processors import ProcessorChain, paths_of
from actors.sampling.truncation import Filters, Restricted, restrict
from protos.draft_tree import DraftTree, SparseProbs
from protos.frozen import value
from protos.messages import Acceptance, Sampling


@value
class DrawAddress:
    """Address of a session's noise; `position` is the position of the first token to decide."""

    seed: int
    choice: int
    position: int

    def key(self, offset: int, purpose: Purpose) -> int:
        return key(self.seed, self.choice, self.position + offset, purpose)


@value
class BlockDecision:
    """Accepted nodes, as a `path` from the root, and the recovered or bonus token, `next_token`.

    `is_finite` is False if logits contain NaN or +inf, or a row contains only -inf. Nothing is decided then.
    """

    path: tuple[int, ...]
    next_token: int
    is_finite: bool = True


NOT_DECIDED = BlockDecision((), 0, is_finite=False)


def offsets(draft: DraftTree) -> list[int]:
    """Returns the positions of a block's draws, relative to the first: 0, then the position after each node."""
    return [0, *[depth + 1 for depth in draft.depths]]


def match(own: Sequence[int], draft: DraftTree) -> BlockDecision:
    """Walks from the root to the child that equals the target's own draw, and accepts it, until no child matches."""
    path: list[int] = []
    last = -1
    drawn = own[0]
    # Children have higher indices than their parents.
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if token == drawn and parent == last:
            path.append(node)
            last = node
            drawn = own[node + 1]
    return BlockDecision(tuple(path), drawn)


def distribution(draft_probs: SparseProbs | None, offset: int, token: int) -> dict[int, float]:
    """Returns the distribution of a draft token, by token id; a point mass if the drafter sent none."""
    if draft_probs is None:
        return {token: 1.0}
    total = sum(draft_probs.weights[offset])
    pairs = zip(draft_probs.token_ids[offset], draft_probs.weights[offset], strict=True)
    return {token_id: weight / total for token_id, weight in pairs if weight > 0}


@value
class PendingBlock:
    """One session's block: zero or more draft tokens to verify, and one further token to draw."""

    rule: Acceptance
    sampling: Sampling
    draft: DraftTree  # always a chain under rejection sampling
    chain: ProcessorChain | None  # the session's processors; None: logits stay unchanged
    at: DrawAddress

    @property
    def positions(self) -> int:
        return len(self.draft.tokens) + 1

    @property
    def draw_keys(self) -> list[int]:
        """Keys of the draws at all positions."""
        at = self.at
        return keys(at.seed, at.choice, [at.position + offset for offset in offsets(self.draft)], Purpose.DRAW)

    @property
    def is_drawn_in_step(self) -> bool:
        """True if the step itself can decide the block: it needs neither processed logits nor probabilities."""
        if self.chain is not None:
            return False
        return self.sampling.greedy or (self.rule is Acceptance.COUPLED and not self.sampling.is_filtered)

    @property
    def kind(self) -> "_Kind":
        rule = Acceptance.COUPLED if self.sampling.greedy else self.rule
        return self.sampling.greedy, rule, self.chain is not None


_Kind = tuple[bool, Acceptance, bool]
"""Grouping key of blocks to decide together: greedy or not, rule, and whether their logits are processed."""


def draws_of(
    blocks: Sequence[PendingBlock], positions: Sequence[int] | None = None, needs_logits: bool = True
) -> Draws:
    """Returns the draws of the blocks' positions; by default, these are all positions with logits.

    All other positions get the likeliest token, which callers ignore.
    """
    sampled: list[int] = []
    draw_keys: list[int] = []
    temperatures: list[float] = []
    first = 0
    for block in blocks:
        if block.is_drawn_in_step and not block.sampling.greedy:
            own = range(first, first + block.positions)
            sampled += own if positions is None else positions[own.start : own.stop]
            draw_keys += block.draw_keys
            temperatures += [block.sampling.temperature] * block.positions
        first += block.positions
    return Draws(tuple(sampled), tuple(draw_keys), tuple(temperatures), needs_logits)


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """Decisions about blocks, encoded as int64 `numbers` on the device; `read` decodes them on the host.

    `read` returns None for a block that needs more candidates.
    """

    numbers: Tensor
    read: Callable[[list[int]], list[BlockDecision | None]]


def decided_in_step(blocks: Sequence[PendingBlock], drawn: Tensor) -> list[BlockDecision]:
    """Reads the step's own decisions about blocks with `is_drawn_in_step`.

    `drawn`, (positions, 2), lists the tokens drawn at all positions and whether these draws lead there
    (`mark_reached`); it is copied to the host once.
    """
    tokens, reached = drawn.cpu().T.tolist()
    decisions = []
    begin = 0
    for block in blocks:
        end = begin + len(block.draft.tokens) + 1
        nodes = [node for node, is_reached in enumerate(reached[begin + 1 : end]) if is_reached]
        last = begin + nodes[-1] + 1 if nodes else begin
        is_finite = NOT_FINITE not in tokens[begin:end]
        decisions.append(BlockDecision(tuple(nodes), tokens[last]) if is_finite else NOT_DECIDED)
        begin = end
    return decisions


def decide(blocks: Sequence[PendingBlock], logits: Tensor, tokens: Tensor | None = None) -> list[BlockDecision]:
    """Decides all blocks. `logits` concatenates their logits, (sum of the blocks' positions, vocabulary).

    `tokens`, (positions,), are the results of `draw_tokens` for the draws of these blocks; by default, they are drawn
    here. If the largest logit of a row is not finite, its block stays undecided. NOT_FINITE replaces the token, so the
    flag needs no further copy. The few blocks that need more than the likeliest candidates are decided again with all
    tokens.
    """
    if not blocks:
        return []
    if tokens is None:
        tokens = draw_tokens(logits, DrawsOnDevice.of(to_device(draws_of(blocks).integers, logits.device)))
    drawn = [index for index, block in enumerate(blocks) if block.is_drawn_in_step]
    row_ranges = [range(*ends) for ends in pairwise([0, *accumulate(block.positions for block in blocks)])]
    decisions: list[BlockDecision | None] = [None] * len(blocks)
    for exhaustive in (False, True):
        done = set() if exhaustive else set(drawn)
        others = [index for index, decision in enumerate(decisions) if decision is None and index not in done]
        groups = _alike(blocks, others, logits)
        answers = [
            _decide_alike([blocks[i] for i in members], _rows(logits, [row_ranges[i] for i in members]), exhaustive)
            for members in groups
        ]
        if done:
            groups.append(drawn)
            own = _rows(tokens, [row_ranges[i] for i in drawn])
            answers.append(_match([blocks[i] for i in drawn], own, None))
        for members, decisions_read in zip(groups, _read(answers), strict=True):
            for index, decision in zip(members, decisions_read, strict=True):
                decisions[index] = decision
    assert None not in decisions, "a thorough decision is exact"
    return [decision for decision in decisions if decision is not None]


def _alike(blocks: Sequence[PendingBlock], indices: Sequence[int], logits: Tensor) -> list[list[int]]:
    """Groups the blocks at `indices` by rule and parameters, within the memory limit; returns the indices per group."""
    if not indices:
        return []
    most = max(1, LOGITS_PER_GROUP[logits.device.type] // logits.shape[1])  # maximum positions per group
    groups: dict[tuple[_Kind, int], list[int]] = defaultdict(list)
    before: Counter[_Kind] = Counter()  # positions grouped so far
    for index in indices:
        block = blocks[index]
        kind = block.kind
        groups[kind, before[kind] // most].append(index)
        before[kind] += block.positions
    return list(groups.values())


def _read(answers: Sequence[_OnDevice]) -> list[list[BlockDecision | None]]:
    """Copies the decisions of all groups to the host in one operation."""
    if not answers:
        return []
    sizes = [len(answer.numbers) for answer in answers]
    numbers = answers[0].numbers if len(answers) == 1 else torch.cat([answer.numbers for answer in answers])
    on_host = iter(numbers.tolist())
    return [answer.read(list(islice(on_host, size))) for answer, size in zip(answers, sizes, strict=True)]


def _rows(logits: Tensor, row_ranges: Sequence[range]) -> Tensor:
    """Returns the logits in these row ranges; a view if the ranges are adjacent."""
    if all(before.stop == after.start for before, after in pairwise(row_ranges)):
        return logits[row_ranges[0].start : row_ranges[-1].stop]
    return logits.index_select(0, to_device([list(chain(*row_ranges))], logits.device)[0])


def _decide_alike(blocks: Sequence[PendingBlock], logits: Tensor, exhaustive: bool) -> _OnDevice:
    """Decides blocks with the same rule and parameters."""
    finite = torch.isfinite(logits.amax(dim=-1))  # before processing: processors write -inf over NaN
    if blocks[0].chain is not None:
        parts = torch.split(logits, [block.positions for block in blocks])
        logits = torch.cat([_processed(part, block) for part, block in zip(parts, blocks, strict=True)])
    if blocks[0].sampling.greedy:
        return _match(blocks, torch.where(finite, logits.max(dim=-1).indices, NOT_FINITE), None)
    filters = Filters.of([block.sampling for block in blocks for _ in range(block.positions)], logits.device)
    restricted = restrict(logits.to(torch.float32), filters, exhaustive)
    if blocks[0].rule is Acceptance.REJECTION:
        return _accept_by_rejection(blocks, restricted, finite)
    draw_keys = [each for block in blocks for each in block.draw_keys]
    own = _draw(restricted.logits, to_device([draw_keys], logits.device)[0], restricted.candidates)
    return _match(blocks, torch.where(finite, own, NOT_FINITE), restricted.is_exact)


def _processed(logits: Tensor, block: PendingBlock) -> Tensor:
    assert block.chain is not None, "either all or no blocks of a kind have processors"
    return block.chain.apply(logits, paths_of(block.draft))


def _draw(scores: Tensor, keys: Tensor, candidates: Tensor | None) -> Tensor:
    """Draws one token per row."""
    if candidates is None:
        return gumbel_argmaxes(scores, keys)
    return gumbel_argmaxes_among(scores, keys, candidates)


def _match(blocks: Sequence[PendingBlock], own: Tensor, is_exact: Tensor | None) -> _OnDevice:
    """Accepts draft tokens that equal the target's own draws, `own`, (positions,)."""
    total = len(own)

    def read(numbers: list[int]) -> list[BlockDecision | None]:
        decisions = _matched(blocks, numbers[:total])
        if is_exact is None:
            return [*decisions]
        sure = iter(numbers[total:])
        are_sure = [all([*islice(sure, block.positions)]) for block in blocks]
        return [
            decision if is_sure or not decision.is_finite else None
            for decision, is_sure in zip(decisions, are_sure, strict=True)
        ]

    return _OnDevice(own if is_exact is None else torch.cat([own, is_exact]), read)


def _matched(blocks: Sequence[PendingBlock], own: list[int]) -> list[BlockDecision]:
    """Decides blocks by the target's own draws at all their positions."""
    decisions = []
    begin = 0
    for block in blocks:
        end = begin + block.positions
        tokens = own[begin:end]
        decisions.append(NOT_DECIDED if NOT_FINITE in tokens else match(tokens, block.draft))
        begin = end
    return decisions


class _Grid:
    """Arranges blocks as rows of a grid, padded to the longest block."""

    def __init__(self, blocks: Sequence[PendingBlock]) -> None:
        self.rows = len(blocks)
        self.drafts = max(len(block.draft) for block in blocks)
        begins = accumulate((block.positions for block in blocks), initial=0)
        # Pad each block by repeating its last position.
        self.row_at = [
            begin + min(i, len(block.draft))
            for begin, block in zip(begins, blocks, strict=False)
            for i in range(self.drafts + 1)
        ]
        self.tokens = [token for b in blocks for token in (*b.draft.tokens, *[0] * (self.drafts - len(b.draft)))]


def _accept_by_rejection(blocks: Sequence[PendingBlock], target: Restricted, finite: Tensor) -> _OnDevice:
    """Accepts with probability min(1, target_probs / draft_probs); draws only at the position after the accepted
    tokens.
    """
    assert all(block.draft.is_chain for block in blocks), "rejection sampling supports only chains"
    device = target.logits.device
    grid = _Grid(blocks)
    inputs = _RejectionInputs(blocks)
    row_at, drafts, keys, ids = to_device([grid.row_at, grid.tokens, inputs.keys, inputs.ids], device)
    bounds, probs = to_device([inputs.bounds, inputs.probs], device, torch.float64)
    row_at = row_at.view(grid.rows, -1)
    row = torch.arange(grid.rows, device=device)
    target_probs = torch.softmax(target.logits.to(torch.float64), dim=-1)
    stands = bounds.view(grid.rows, -1) < target_probs[row_at[:, :-1], drafts.view(grid.rows, -1)]
    accepted = stands.cumprod(dim=1).sum(dim=1)
    here = row_at[row, accepted]  # (rows,): position of the first rejected draft token, or after the last draft token
    target_rows = target_probs[here]  # (rows, vocabulary)
    draft_ids = ids.view(grid.rows, grid.drafts + 1, -1)[row, accepted]
    draft_probs = probs.view(grid.rows, grid.drafts + 1, -1)[row, accepted]
    residual = target_rows.scatter_add(1, draft_ids, -draft_probs).clamp_min(0)
    # If the distributions are equal, the residual has no mass apart from rounding errors.
    left = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, target_rows)
    candidates = None if target.candidates is None else target.candidates[here]
    token = _draw(left.log(), keys.view(grid.rows, -1)[row, accepted], candidates)
    token = torch.where(finite[row_at].all(dim=1), token, NOT_FINITE)
    is_exact = target.is_exact[row_at].all(dim=1)

    def decision(stood: int, token: int, is_exact: int) -> BlockDecision | None:
        if token == NOT_FINITE:
            return NOT_DECIDED
        return BlockDecision(tuple(range(stood)), token) if is_exact else None

    def read(numbers: list[int]) -> list[BlockDecision | None]:
        count = grid.rows
        columns = zip(numbers[:count], numbers[count : 2 * count], numbers[2 * count :], strict=True)
        return [decision(*column) for column in columns]

    return _OnDevice(torch.cat([accepted, token, is_exact]), read)


class _RejectionInputs:
    """Inputs of rejection sampling, for every cell of the grid.

    `bounds`, (blocks, drafts): a draft token is accepted if its target probability exceeds its bound. `keys`, (blocks,
    drafts + 1): key of the draw if all earlier draft tokens are accepted. `ids` and `probs`, (blocks, drafts + 1,
    width): distribution of the draft token.
    """

    def __init__(self, blocks: Sequence[PendingBlock]) -> None:
        drafts = max(len(block.draft) for block in blocks)
        self.bounds: list[float] = []
        self.keys: list[int] = []
        rows: list[dict[int, float]] = []
        for block in blocks:
            draft = block.draft
            count = len(draft)
            beyond = drafts - count
            own = [distribution(draft.probs, offset, token) for offset, token in enumerate(draft.tokens)]
            uniforms = [uniform_scalar(block.at.key(offset, Purpose.ACCEPT)) for offset in range(count)]
            self.bounds += [u * row[token] for u, row, token in zip(uniforms, own, draft.tokens, strict=True)]
            self.bounds += [torch.inf] * beyond
            self.keys += [block.at.key(offset, Purpose.RECOVER) for offset in range(count)]
            self.keys += [block.at.key(count, Purpose.DRAW)] * (beyond + 1)
            rows += [*own, *[{}] * (beyond + 1)]
        width = max(map(len, rows))
        self.ids = [token for row in rows for token in (*row, *[0] * (width - len(row)))]
        self.probs = [prob for row in rows for prob in (*row.values(), *[0.0] * (width - len(row)))]
