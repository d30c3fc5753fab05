"""N-gram drafts: propose what followed earlier occurrences of the text's own end (prompt lookup decoding, Saxena 2023).

They need no model and no GPU. A chain is the continuation of the latest occurrence of the longest suffix (`look_up`).
Its tokens are point masses: under rejection sampling each is accepted with its target probability. A tree holds the
likeliest of all continuations found in the text:

* `Occurrences` are the earlier positions of the text's suffixes, and the tokens that followed. One search finds them
  for all suffixes.
* `Continuations` derives longer paths from the same search. It searches again only where no occurrence continues (after
  REST: He et al. 2023, arXiv 2311.08252).
* `NgramCalibration` turns a token's share among the continuations into a probability. Shares predict better the longer
  the match and the more occurrences it has, so each kind of evidence has a ratio fitted to verdicts. Each session has
  one too, since some texts copy and others do not.
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
from cluster.drafting.requests import LookaheadRequest, Proposal, SessionText, with_empty
from cluster.drafting.trees import MAX_SIBLINGS, NO_CHOICES, Choices, TokenPath, grown_paths, tree_of
from cluster.speculation.estimators import Pairs
from protos.draft_tree import DraftTree
from protos.frozen import value
from protos.messages import DraftRequest, Open, Shape
from protos.prefix import hashes_after

Ids = NDArray[np.int32]
Indices = NDArray[np.int64]

MAX_OCCURRENCES = 32  # most occurrences considered; longer matches first, then later ones
LENGTH_FACTOR = 4.0  # weight factor for each further matching token
AGE_FACTOR = 0.9  # weight factor for each more recent occurrence


class GrowingText:
    """A text's tokens as an array that grows in place; converting 100,000 tokens every round would be slow."""

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
        """View of all tokens, (length,); later `extend` calls do not change it."""
        return self._buffer[: self._length]

    def followed_by(self, tokens: Sequence[int]) -> Ids:
        """Returns the text with `tokens` appended, (length + tokens,)."""
        return np.concatenate((self.tokens, np.array(tokens, dtype=np.int32))) if tokens else self.tokens


@dataclass(frozen=True, eq=False, slots=True)
class Occurrences:
    """Earlier positions in a text where one of its suffixes occurs."""

    tokens: Ids  # the text that was searched
    ends: Indices  # (count,): index of the token after each occurrence, ascending
    sizes: Indices  # (count,): length of each match in tokens, at most the longest suffix compared

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def size(self) -> int:
        """Length of the longest match, in tokens."""
        return int(self.sizes.max())

    def shares(self) -> Mapping[int, float]:
        """Returns each following token's share, largest first, weighted by frequency, recency and match length."""
        ages = np.arange(len(self))[::-1]
        weights = LENGTH_FACTOR ** (self.sizes - self.size) * AGE_FACTOR**ages
        totals: dict[int, float] = {}
        for token, weight in zip(self.tokens[self.ends].tolist(), (weights / weights.sum()).tolist(), strict=True):
            totals[token] = totals.get(token, 0.0) + weight
        return dict(sorted(totals.items(), key=lambda share: -share[1]))

    def after(self, token: int) -> "Occurrences":
        """Returns the occurrences followed by this token, advanced by one; drops those at the text's end."""
        mask = (self.tokens[self.ends] == token) & (self.ends + 1 < len(self.tokens))
        return Occurrences(self.tokens, self.ends[mask] + 1, self.sizes[mask] + 1)


def occurrences(tokens: Ids, longest: int, shortest: int) -> Occurrences:
    """Finds earlier occurrences of the text's suffixes of `shortest` to `longest` tokens.

    Returns each position once, with its longest match.
    """
    end = len(tokens)
    if end <= shortest:
        nowhere = np.empty(0, dtype=np.int64)
        return Occurrences(tokens, nowhere, nowhere)
    is_same = np.ones(end - shortest, dtype=np.bool_)  # indexed by the token after the match, starting at `shortest`
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
    """Finds candidates after each path of further tokens; cached while a block is drafted."""

    def __init__(self, text: GrowingText, outcome: Sequence[int], longest: int, shortest: int) -> None:
        self._text = text
        self._outcome = tuple(outcome)
        self._longest = longest
        self._shortest = shortest
        self._known: dict[tuple[int, ...], Occurrences] = {}

    def at(self, path: tuple[int, ...]) -> Occurrences:
        """Returns the occurrences after this path; empty if the text has none."""
        if path not in self._known:
            gone_on = self.at(path[:-1]).after(path[-1]) if path else None
            self._known[path] = gone_on or self._search(path)
        return self._known[path]

    def _search(self, path: tuple[int, ...]) -> Occurrences:
        return occurrences(self._text.followed_by((*self._outcome, *path)), self._longest, self._shortest)


MAX_TOTAL_PROBABILITY = 0.98  # upper bound of the candidates' total probability: any text may diverge
CERTAIN_SHARE = 0.999  # above this share, all occurrences continue with the same token
OFTEN_OCCURRENCES = 4  # fewest occurrences for which `is_often` holds
KIND_SIZES = (2, 3, 4, 8)  # upper bounds of match lengths per kind; longer matches form the last kind
KIND_MEMORY = 1 / 512
SESSION_MEMORY = 1 / 64
PRIOR_WEIGHT = 8.0  # weight of a kind's prior, as a number of observations
SESSION_PRIOR = 4.0  # weight of a session's prior, in expected tokens

# Ratios fitted on 160 answers of SmolLM2-135M-Instruct, greedy and sampled, by the match length in tokens:
# two or fewer, three, more.
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
    """Kind of evidence for a token; all shares of one kind have one learned ratio."""

    size: int  # index in KIND_SIZES; len(KIND_SIZES) for longer matches
    is_lone: bool  # whether there is exactly one occurrence
    is_often: bool  # whether there are at least OFTEN_OCCURRENCES occurrences
    is_most: bool | None  # whether the token follows at least half of the occurrences; None: all of them

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
class Known:
    """Candidate tokens at one position, with their shares and estimated total probability."""

    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    evidence: tuple[Evidence, ...]
    expected: float  # probability that the next token is one of these, before the session's ratio

    def __len__(self) -> int:
        return len(self.tokens)


class NgramCalibration:
    """All ratios of a drafter, and the candidates at positions that the target has not decided yet."""

    def __init__(self) -> None:
        self._kinds: dict[Evidence, Pairs] = {}  # pairs of (share, whether the token followed)
        self._sessions: dict[str, Pairs] = {}  # pairs of (total probability of the candidates, whether one followed)
        self._open: PendingPositions[Known] = PendingPositions()

    def consider(self, session: str, position: TextPosition, occurrences: Occurrences) -> Choices:
        """Returns the candidates at a position with their probabilities, likeliest first.

        Records them, to learn from the target's token at that position.
        """
        if not occurrences:
            return NO_CHOICES
        shares = dict(list(occurrences.shares().items())[:MAX_SIBLINGS])
        evidence = tuple([Evidence.of(occurrences, share) for share in shares.values()])
        worth = [share * self._kind(kind).ratio for share, kind in zip(shares.values(), evidence, strict=True)]
        expected = min(MAX_TOTAL_PROBABILITY, sum(worth))
        self._open.note(session, position, Known(tuple(shares), tuple(shares.values()), evidence, expected))
        scale = min(MAX_TOTAL_PROBABILITY, expected * self._session(session).ratio) / sum(worth)
        ranked = sorted(zip(shares, worth, strict=True), key=lambda choice: -choice[1])
        return Choices(tuple([token for token, _ in ranked]), tuple([scale * chance for _, chance in ranked]))

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        """Learns from the positions that the session's committed text has reached."""
        for prediction, token in self._open.resolve(session, tokens):
            self._learn(session, prediction, token)

    def close(self, sessions: Sequence[str]) -> None:
        """Forgets sessions; unknown ones are ignored."""
        for session in sessions:
            self._open.close(session)
            self._sessions.pop(session, None)

    def _learn(self, session: str, prediction: Known, came: int) -> None:
        for token, share, kind in zip(prediction.tokens, prediction.shares, prediction.evidence, strict=True):
            self._kinds[kind] = self._kind(kind).after(share, float(token == came), KIND_MEMORY)
        hit = float(came in prediction.tokens)
        self._sessions[session] = self._session(session).after(prediction.expected, hit, SESSION_MEMORY)

    def _kind(self, kind: Evidence) -> Pairs:
        return self._kinds.get(kind) or kind.prior

    def _session(self, session: str) -> Pairs:
        return self._sessions.get(session) or Pairs(weight=SESSION_PRIOR, x=SESSION_PRIOR, y=SESSION_PRIOR)


TOKEN_BYTES = 4
OUTCOMES = 4  # most outcomes to draft for once the roots are drafted
MAX_SIDE_ROOTS = 4  # most siblings of the main path for which continuations are drafted ahead


def look_up(tokens: Sequence[int], max_tokens: int, longest: int, shortest: int) -> tuple[int, ...]:
    """Returns the tokens after the latest earlier occurrence of the longest suffix (`shortest` to `longest` tokens)."""
    text = np.asarray(tokens, dtype="<i4").tobytes()  # searched as bytes: contexts are long, and this runs every round
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        end = _latest(text, text[-TOKEN_BYTES * size :])
        if end is not None:
            return tuple(tokens[end : end + max_tokens])
    return ()


def _latest(text: bytes, suffix: bytes) -> int | None:
    """Returns the index of the token after the latest occurrence of `suffix` that ends before the text ends."""
    before = len(text) - 1
    while (start := text.rfind(suffix, 0, before)) >= 0:
        if start % TOKEN_BYTES == 0:
            return (start + len(suffix)) // TOKEN_BYTES
        before = start + len(suffix) - 1  # a match across a token boundary is no occurrence
    return None


def create(draft: DraftPool, setup: DraftSetup) -> "NgramDraft":
    options = draft.ngram
    return NgramDraft(options.max_ngram, options.min_ngram)


@dataclass(kw_only=True, eq=False)
class NgramBlock(BlockDraft):
    """A block drafted from the text's own continuations. For a tree, `drafted` is its main path."""

    known: Continuations  # candidates in the text after the outcome
    nodes: list[tuple[TokenPath, float]] = field(default_factory=list)  # acceptance probability by path, highest first

    @property
    def paths(self) -> list[tuple[TokenPath, float]]:
        return self.nodes


class NgramDraft:
    """Drafting method based on `look_up` for chains and `Continuations` for trees."""

    shapes = frozenset(Shape)
    tokens_per_forward = 1
    outcomes = OUTCOMES

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._texts: dict[str, SessionText] = {}
        self._arrays: dict[str, GrowingText] = {}  # tokens of `_texts` as arrays
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
        """Drafts for likely outcomes without checking for interrupts, because drafting ends before a verdict could
        arrive.

        A session that got no candidates gets an empty proposal if the target currently decodes it without a block.
        """
        drafts = draft_ahead(self, requests, ForwardTime(), clock=lambda: 0.0, interrupted=interrupted, early=dismiss)
        return with_empty(proposals(drafts), requests)

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
            estimates_first=False,  # the acceptance published for a draft model does not apply to n-grams
            known=Continuations(self._arrays[request.session], outcome, self._longest, self._shortest),
        )

    # ------------------------------------------------------------ blocks ahead of a verdict

    def roots(self, request: LookaheadRequest) -> list[NgramBlock]:
        """Returns a root for the main path and one for each of its siblings.

        Under rejection sampling, roots assume that all draft tokens are accepted.
        """
        tree = request.unverified
        main_path = tree.main_path
        paths = [tuple([tree.tokens[node] for node in nodes]) for nodes in ([] if tree.is_chain else tree.paths)]
        beside = [path for path in paths if path != main_path[: len(path)]]
        return [self._root(request, path) for path in (main_path, *beside[:MAX_SIDE_ROOTS])]

    def _root(self, request: LookaheadRequest, path: TokenPath) -> NgramBlock:
        """Makes a root from the tokens of `path`, with alternatives found in the text at each position."""
        root = self._begin(request, (), 1.0, len(path) + 1)
        root.unverified = path
        for token in path:
            there = _sure(token) if root.sends_probs else self._choices(root, root.tokens)
            there = there.including(token, request.claim((*root.tokens, token)))
            root.drafted.append(DraftedToken(token, there, root.p_accepted * there.chance_of(token)))
        root.settle()
        return root

    def fork(self, root: NgramBlock, outcome: tuple[int, ...], chance: float, max_tokens: int) -> NgramBlock:
        return self._begin(root.request, outcome, chance, max_tokens)

    def preview(self, drafts: Sequence[NgramBlock], interrupted: Callable[[], bool]) -> None:
        """Does nothing: a search is as fast as any preview."""

    def extend(self, drafts: Sequence[NgramBlock], interrupted: Callable[[], bool] = lambda: False) -> list[NgramBlock]:
        """Extends drafts as far as the text continues; returns those that got more tokens."""
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
            draft.append(token, _sure(token) if sure else _first(token, self._choices(draft, draft.tokens)))

    def _end(self, root: NgramBlock) -> None:
        """Adds candidates after the root's last token, except draft tokens already under verification."""
        path = root.tokens
        expected = _children(root.lookahead.unverified, path)
        others = [choice for choice in self._choices(root, path) if choice[0] not in expected]
        if others:
            there = Choices([token for token, _ in others], [chance for _, chance in others])
            root.drafted.append(DraftedToken(there.tokens[0], there, root.p_accepted * there.chances[0]))

    def _grow(self, draft: NgramBlock) -> None:
        """Drafts all sufficiently likely continuations as a tree."""
        draft.nodes = grown_paths(lambda path: self._choices(draft, path), draft.max_tokens, draft.least_chance)
        chances = dict(draft.nodes)
        main_path = tree_of(draft.nodes).main_path
        for depth, token in enumerate(main_path, 1):
            draft.drafted.append(DraftedToken(token, _sure(token), chances[main_path[:depth]]))

    def _choices(self, draft: NgramBlock, path: TokenPath) -> Choices:
        """Returns candidates after this path of the block."""
        position = (draft.request.base_len, (*draft.outcome, *path))
        return self._calibration.consider(draft.request.session, position, draft.known.at(path))


def _sure(token: int) -> Choices:
    """Returns the token as the only candidate, with probability 1."""
    return Choices((token,), (1.0,))


def _first(token: int, there: Choices) -> Choices:
    """Moves `token` to the front of the candidates."""
    others = [choice for choice in there if choice[0] != token]
    tokens = (token, *[other for other, _ in others])
    return Choices(tokens, (there.chance_of(token), *[chance for _, chance in others]))


def _children(tree: DraftTree, path: TokenPath) -> tuple[int, ...]:
    """Returns the tree's draft tokens directly after this path."""
    nodes = tree.along(path)
    return tree.children(nodes[-1] if nodes else -1)
