"""Proposes the tokens that followed earlier occurrences of the text's suffix (prompt lookup decoding, Saxena 2023).

They need no model and no GPU. A chain continues the latest occurrence of the longest suffix (`look_up`). Its tokens are
point masses: under rejection sampling, each is accepted with its target probability. A tree contains the likeliest
continuations in the text:

* `Occurrences` lists the earlier positions of the text's suffixes and the tokens after them. One search covers all
  suffixes.
* `Continuations` derives longer paths from the same search, and searches again only if no occurrence continues (after
  REST: He et al. 2023, arXiv 2311.08252).
* `NgramCalibration` converts a token's share of the continuations to a probability. Shares predict better with longer
  matches and more occurrences, so each kind of evidence has a ratio, fitted to verdicts. Each session also has a ratio,
  since texts differ in how much they copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from actors.drafters.registry import DraftSetup
from cluster.config import DraftPool
from cluster.drafting.draft_state import BlockDraft, DraftedToken
from cluster.drafting.lookahead import ForwardTime, PendingPositions, TextPosition, draft_ahead, proposals
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal, SessionText, with_empty_proposals
from cluster.drafting.trees import MAX_SIBLINGS, NO_CHOICES, Choices, TokenPath, grown_paths, tree_of
from cluster.speculation.estimators import Pairs
from protos.draft_tree import DraftTree
from protos.frozen import value
from protos.messages import DraftRequest, Open, Shape
from protos.prefix import hashes_after

Ids = NDArray[np.int32]
Indices = NDArray[np.int64]

MAX_OCCURRENCES = 32  # maximum occurrences; prefers longer, then later matches
LENGTH_FACTOR = 4.0  # weight factor per matching token
AGE_FACTOR = 0.9  # weight factor per later occurrence


class GrowingText:
    """A text's tokens as an array that grows in place, because converting 100,000 tokens per round would be slow."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._buffer = np.array(tokens, dtype=np.int32)
        self._length = len(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._buffer):
            buffer = np.empty(2 * end, dtype=np.int32)
            buffer[: self._length] = self.tokens
            self._buffer = buffer
        self._buffer[self._length : end] = tokens
        self._length = end

    @property
    def tokens(self) -> Ids:
        """View of all tokens, (length,); not affected by later `extend` calls."""
        return self._buffer[: self._length]

    def following_tokens(self, tokens: Sequence[int]) -> Ids:
        """Returns the text with `tokens` appended, (length + tokens,)."""
        return np.concatenate((self.tokens, np.array(tokens, dtype=np.int32))) if tokens else self.tokens


@dataclass(frozen=True, eq=False, slots=True)
class Occurrences:
    """Earlier positions in a text at which one of its suffixes occurs."""

    tokens: Ids  # the searched text
    ends: Indices  # (count,): index of the token after each occurrence, ascending
    sizes: Indices  # (count,): length of each match, in tokens

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def size(self) -> int:
        """Length of the longest match, in tokens."""
        return int(self.sizes.max())

    def shares(self) -> Mapping[int, float]:
        """Returns the share of each next token, largest first, weighted by frequency, recency and match length."""
        ages = np.arange(len(self))[::-1]
        weights = LENGTH_FACTOR ** (self.sizes - self.size) * AGE_FACTOR**ages
        totals: dict[int, float] = {}
        for token, weight in zip(self.tokens[self.ends].tolist(), (weights / weights.sum()).tolist(), strict=True):
            totals[token] = totals.get(token, 0.0) + weight
        return dict(sorted(totals.items(), key=lambda share: -share[1]))

    def after(self, token: int) -> "Occurrences":
        """Keeps the occurrences followed by `token` and advances them by one; drops those that reach the text's end."""
        mask = (self.tokens[self.ends] == token) & (self.ends + 1 < len(self.tokens))
        return Occurrences(self.tokens, self.ends[mask] + 1, self.sizes[mask] + 1)


def occurrences(tokens: Ids, longest: int, shortest: int) -> Occurrences:
    """Finds earlier occurrences of the text's suffixes of `shortest` to `longest` tokens.

    Returns each position once, with the longest match.
    """
    end = len(tokens)
    if end <= shortest:
        no_ends = np.empty(0, dtype=np.int64)
        return Occurrences(tokens, no_ends, no_ends)
    is_same = np.ones(end - shortest, dtype=np.bool_)  # by index of the token after the match, minus `shortest`
    for back in range(1, shortest + 1):
        is_same &= tokens[shortest - back : end - back] == tokens[end - back]
    ends = np.flatnonzero(is_same) + shortest
    sizes = np.full(len(ends), shortest)
    for size in range(shortest + 1, longest + 1):
        reaches = (sizes == size - 1) & (ends >= size)
        sizes[reaches] += tokens[ends[reaches] - size] == tokens[end - size] if end >= size else 0
    best = np.sort(np.lexsort((ends, sizes))[-MAX_OCCURRENCES:])
    return Occurrences(tokens, ends[best], sizes[best])


class Continuations:
    """Finds and caches the candidates after each path of a block."""

    def __init__(self, text: GrowingText, outcome: Sequence[int], longest: int, shortest: int) -> None:
        self._text = text
        self._outcome = tuple(outcome)
        self._longest = longest
        self._shortest = shortest
        self._known: dict[tuple[int, ...], Occurrences] = {}

    def at(self, path: tuple[int, ...]) -> Occurrences:
        """Returns the occurrences after a path; empty if there are none."""
        if path not in self._known:
            continued = self.at(path[:-1]).after(path[-1]) if path else None
            self._known[path] = continued or self._search(path)
        return self._known[path]

    def _search(self, path: tuple[int, ...]) -> Occurrences:
        return occurrences(self._text.following_tokens((*self._outcome, *path)), self._longest, self._shortest)


MAX_TOTAL_PROBABILITY = 0.98  # upper bound of the candidates' total probability, since any text may diverge
CERTAIN_SHARE = 0.999  # above this share, all occurrences count as agreeing
OFTEN_OCCURRENCES = 4  # minimum occurrences for `is_often`
KIND_SIZES = (2, 3, 4, 8)  # maximum match length of each kind; longer matches form the last kind
KIND_MEMORY = 1 / 512
SESSION_MEMORY = 1 / 64
PRIOR_WEIGHT = 8.0  # weight of a kind's prior, in observations
SESSION_PRIOR = 4.0  # weight of a session's prior, in expected tokens

# Ratios fitted on 160 greedy and sampled answers of SmolLM2-135M-Instruct, for match lengths of at most two, three, and
# more tokens.
LONE_PRIOR = (0.45, 0.48, 0.71)
PRIORS: Mapping[tuple[bool, bool | None], tuple[float, float, float]] = MappingProxyType(
    {  # keys: (is_often, is_most)
        (False, None): (0.69, 0.78, 0.91),
        (False, True): (0.53, 0.4, 0.7),
        (False, False): (0.32, 0.75, 0.69),
        (True, None): (0.91, 0.95, 0.98),
        (True, True): (0.84, 0.89, 0.93),
        (True, False): (0.53, 0.54, 0.66),
    }
)


@value
class Evidence:
    """Kind of evidence for a token, with one learned ratio of probability to share."""

    size: int  # index in KIND_SIZES; len(KIND_SIZES) for longer matches
    is_lone: bool  # exactly one occurrence
    is_often: bool  # at least OFTEN_OCCURRENCES occurrences
    is_most: bool | None  # the token follows at least half of the occurrences; None: all

    @classmethod
    def of(cls, occurrences: Occurrences, share: float) -> "Evidence":
        size = next((index for index, most in enumerate(KIND_SIZES) if occurrences.size <= most), len(KIND_SIZES))
        return cls(
            size,
            len(occurrences) == 1,
            len(occurrences) >= OFTEN_OCCURRENCES,
            None if share > CERTAIN_SHARE else share >= 0.5,
        )

    @property
    def prior(self) -> Pairs:
        worth = (LONE_PRIOR if self.is_lone else PRIORS[self.is_often, self.is_most])[min(self.size, 2)]
        return Pairs(weight=PRIOR_WEIGHT, x=PRIOR_WEIGHT, y=PRIOR_WEIGHT * worth)


@value
class MatchedContinuations:
    """Candidate tokens at one position, with their shares and estimated total probability."""

    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    evidence: tuple[Evidence, ...]
    expected: float  # total probability of the candidates, before the session's ratio

    def __len__(self) -> int:
        return len(self.tokens)


class NgramCalibration:
    """All ratios of a drafter, and the candidates at positions not yet decided by the target."""

    def __init__(self) -> None:
        self._kinds: dict[Evidence, Pairs] = {}  # pairs: share, whether the token followed
        self._sessions: dict[str, Pairs] = {}  # pairs: total probability, whether a candidate followed
        self._open: PendingPositions[MatchedContinuations] = PendingPositions()

    def consider(self, session: str, position: TextPosition, occurrences: Occurrences) -> Choices:
        """Returns the candidates at a position and their probabilities, likeliest first.

        Records the candidates, to learn from the target's token at this position.
        """
        if not occurrences:
            return NO_CHOICES
        shares = dict(list(occurrences.shares().items())[:MAX_SIBLINGS])
        evidence = tuple([Evidence.of(occurrences, share) for share in shares.values()])
        worth = [share * self._kind(kind).ratio for share, kind in zip(shares.values(), evidence, strict=True)]
        expected = min(MAX_TOTAL_PROBABILITY, sum(worth))
        self._open.note(
            session, position, MatchedContinuations(tuple(shares), tuple(shares.values()), evidence, expected)
        )
        scale = min(MAX_TOTAL_PROBABILITY, expected * self._session(session).ratio) / sum(worth)
        ranked = sorted(zip(shares, worth, strict=True), key=lambda choice: -choice[1])
        return Choices(tuple([token for token, _ in ranked]), tuple([scale * chance for _, chance in ranked]))

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        """Learns from positions within the session's committed text."""
        for prediction, token in self._open.resolve(session, tokens):
            self._learn(session, prediction, token)

    def close(self, sessions: Sequence[str]) -> None:
        """Drops sessions. Ignores unknown sessions."""
        for session in sessions:
            self._open.close(session)
            self._sessions.pop(session, None)

    def _learn(self, session: str, prediction: MatchedContinuations, observed: int) -> None:
        for token, share, kind in zip(prediction.tokens, prediction.shares, prediction.evidence, strict=True):
            self._kinds[kind] = self._kind(kind).after(share, float(token == observed), KIND_MEMORY)
        hit = float(observed in prediction.tokens)
        self._sessions[session] = self._session(session).after(prediction.expected, hit, SESSION_MEMORY)

    def _kind(self, kind: Evidence) -> Pairs:
        return self._kinds.get(kind) or kind.prior

    def _session(self, session: str) -> Pairs:
        return self._sessions.get(session) or Pairs(weight=SESSION_PRIOR, x=SESSION_PRIOR, y=SESSION_PRIOR)


TOKEN_BYTES = 4
OUTCOMES = 4  # maximum outcomes to draft for after the roots
MAX_SIDE_ROOTS = 4  # maximum siblings of the main path to draft ahead for


def look_up(tokens: Sequence[int], max_tokens: int, longest: int, shortest: int) -> tuple[int, ...]:
    """Returns the tokens after the latest repeat of the longest suffix (`shortest` to `longest` tokens)."""
    text = np.asarray(tokens, dtype="<i4").tobytes()  # bytes are fast to search; this runs in every round
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        end = _latest(text, text[-TOKEN_BYTES * size :])
        if end is not None:
            return tuple(tokens[end : end + max_tokens])
    return ()


def _latest(text: bytes, suffix: bytes) -> int | None:
    """Returns the index of the token after the latest occurrence of `suffix` that ends before the end of the text."""
    before = len(text) - 1
    while (start := text.rfind(suffix, 0, before)) >= 0:
        if start % TOKEN_BYTES == 0:
            return (start + len(suffix)) // TOKEN_BYTES
        before = start + len(suffix) - 1  # skips matches at byte offsets inside a token
    return None


def create(draft: DraftPool, setup: DraftSetup) -> "NgramDraft":
    options = draft.ngram
    return NgramDraft(options.max_ngram, options.min_ngram)


@dataclass(kw_only=True, eq=False)
class NgramBlock(BlockDraft):
    """Block drafted from continuations in the text. For a tree, `drafted` is the main path."""

    known: Continuations  # candidates in the text after the outcome
    nodes: list[tuple[TokenPath, float]] = field(default_factory=list)  # with acceptance probabilities, highest first

    @property
    def paths(self) -> list[tuple[TokenPath, float]]:
        return self.nodes


class NgramDraft:
    """Drafting method that uses `look_up` for chains and `Continuations` for trees."""

    shapes = frozenset(Shape)
    tokens_per_forward = 1
    outcomes = OUTCOMES

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._texts: dict[str, SessionText] = {}
        self._arrays: dict[str, GrowingText] = {}  # tokens of `_texts`
        self._calibration = NgramCalibration()

    def open(self, request: Open) -> None:
        self._texts[request.session] = SessionText.begin(request)
        self._arrays[request.session] = GrowingText(request.tokens)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._texts[session].tokens.extend(tokens)
        self._arrays[session].extend(tokens)
        self._calibration.committed(session, self._texts[session].tokens)

    def close(self, sessions: Sequence[str]) -> None:
        self._calibration.close(sessions)
        for session in sessions:
            self._texts.pop(session, None)
            self._arrays.pop(session, None)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [self._begin(request, (), 1.0, request.max_tokens) for request in requests]
        self.extend(drafts)
        return [draft.proposal() for draft in drafts]

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """Drafts for likely outcomes. Never calls `early`, because drafting ends before a verdict could arrive.

        Without candidates, proposes an empty block if the target currently decodes the session without blocks.
        """
        drafts = draft_ahead(self, requests, ForwardTime(), clock=lambda: 0.0, interrupted=interrupted, early=dismiss)
        return with_empty_proposals(proposals(drafts), requests)

    def _begin(
        self, request: DraftRequest | LookaheadRequest, outcome: tuple[int, ...], chance: float, max_tokens: int
    ) -> NgramBlock:
        return NgramBlock(
            request=request,
            text=self._texts[request.session],
            base_hash=hashes_after(request.prefix_hash, outcome)[-1] if outcome else request.prefix_hash,
            max_tokens=max_tokens,
            outcome=outcome,
            chance=chance,
            estimates_first=False,  # a draft model's published acceptance does not apply to n-grams
            known=Continuations(self._arrays[request.session], outcome, self._longest, self._shortest),
        )

    # ------------------------------------------------------------ blocks ahead of a verdict

    def roots(self, request: LookaheadRequest) -> list[NgramBlock]:
        """Returns one root for the main path and one per sibling of it.

        Under rejection sampling, a root assumes that all draft tokens are accepted.
        """
        tree = request.unverified
        main_path = tree.main_path
        paths = [tuple([tree.tokens[node] for node in nodes]) for nodes in ([] if tree.is_chain else tree.paths)]
        beside = [path for path in paths if path != main_path[: len(path)]]
        return [self._root(request, path) for path in (main_path, *beside[:MAX_SIDE_ROOTS])]

    def _root(self, request: LookaheadRequest, path: TokenPath) -> NgramBlock:
        """Creates a root from the tokens of `path`, with alternatives from the text at each position."""
        root = self._begin(request, (), 1.0, len(path) + 1)
        root.unverified = path
        for token in path:
            there = _certain(token) if root.sends_probs else self._choices(root, root.tokens)
            there = there.including(token, request.conditional_chance((*root.tokens, token)))
            root.drafted.append(DraftedToken(token, there, root.p_accepted * there.chance_of(token)))
        root.settle()
        return root

    def fork(self, root: NgramBlock, outcome: tuple[int, ...], chance: float, max_tokens: int) -> NgramBlock:
        return self._begin(root.request, outcome, chance, max_tokens)

    def preview(self, drafts: Sequence[NgramBlock], interrupted: Callable[[], bool]) -> None:
        """Does nothing, since a search is as fast as any preview."""

    def extend(self, drafts: Sequence[NgramBlock], interrupted: Callable[[], bool] = lambda: False) -> list[NgramBlock]:
        """Extends drafts while occurrences continue; returns the extended drafts."""
        return [draft for draft in drafts if self._extend(draft)]

    def _extend(self, draft: NgramBlock) -> bool:
        before = len(draft.drafted)
        if draft.sends_probs or not (draft.takes_trees or draft.is_root):
            self._follow(draft)
        elif draft.is_root:
            self._end(draft)
        else:
            self._grow(draft)
        draft.settle()
        draft.is_cut = True
        return len(draft.drafted) > before

    def _follow(self, draft: NgramBlock) -> None:
        """Drafts one continuation, as a chain."""
        text = (*draft.text.tokens, *draft.outcome, *draft.tokens)
        for token in look_up(text, draft.missing, self._longest, self._shortest):
            sure = draft.sends_probs
            draft.append(token, _certain(token) if sure else _first(token, self._choices(draft, draft.tokens)))

    def _end(self, root: NgramBlock) -> None:
        """Adds candidates after the root's last token, except draft tokens under verification."""
        path = root.tokens
        expected = _children(root.lookahead.unverified, path)
        others = [choice for choice in self._choices(root, path) if choice[0] not in expected]
        if others:
            there = Choices([token for token, _ in others], [chance for _, chance in others])
            root.drafted.append(DraftedToken(there.tokens[0], there, root.p_accepted * there.chances[0]))

    def _grow(self, draft: NgramBlock) -> None:
        """Drafts all sufficiently likely continuations, as a tree."""
        draft.nodes = grown_paths(lambda path: self._choices(draft, path), draft.max_tokens, draft.least_chance)
        chances = dict(draft.nodes)
        main_path = tree_of(draft.nodes).main_path
        for depth, token in enumerate(main_path, 1):
            draft.drafted.append(DraftedToken(token, _certain(token), chances[main_path[:depth]]))

    def _choices(self, draft: NgramBlock, path: TokenPath) -> Choices:
        """Returns candidates after a path of the block."""
        position = (draft.request.base_len, (*draft.outcome, *path))
        return self._calibration.consider(draft.request.session, position, draft.known.at(path))


def _certain(token: int) -> Choices:
    """Returns `token` as the only candidate, with probability 1."""
    return Choices((token,), (1.0,))


def _first(token: int, there: Choices) -> Choices:
    """Moves `token` to the front of the candidates."""
    others = [choice for choice in there if choice[0] != token]
    tokens = (token, *[other for other, _ in others])
    return Choices(tokens, (there.chance_of(token), *[chance for _, chance in others]))


def _children(tree: DraftTree, path: TokenPath) -> tuple[int, ...]:
    """Returns the tree's children of the node at the end of `path`."""
    nodes = tree.along(path)
    return tree.children(nodes[-1] if nodes else -1)
