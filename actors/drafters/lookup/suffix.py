"""Suffix decoding: proposes the tokens after earlier occurrences of the text's suffix, in the text or recent answers.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) needs no model and no GPU. Several continuations form a tree,
weighted by frequency. Tokens are point masses: under rejection sampling, each is accepted with its target probability.

`SuffixIndex` finds occurrences by a hash of the preceding few tokens, then compares backwards. `RecentAnswers` has one
index per cache salt, because clients may see their drafts, and salts isolate callers from each other.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.drafters.registry import DraftSetup
from cluster.config import DraftPool
from cluster.config_sections import SuffixOptions
from cluster.drafting.draft_state import BlockDraft
from cluster.drafting.lookahead import MAX_OUTCOMES, ForwardTime, draft_ahead, proposals
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal, SessionText, with_empty_proposals
from cluster.drafting.trees import NO_CHOICES, Choices, TokenPath, grow_branches
from protos.messages import DraftRequest, Open, Shape

MAX_COUNTED_OCCURRENCES = 4  # limit of the count in `kind`; further occurrences do not make a known next token likelier
MAX_OCCURRENCES = 64  # latest occurrences to compare
MAX_OBSERVATIONS = 256  # observations per rate; at this number, counts are halved

Occurrence = tuple[list[int], int]
"""A text and the index of a token in it."""


@dataclass(frozen=True, slots=True)
class Match:
    """Positions after each occurrence of the longest matching suffix, latest first."""

    length: int  # tokens
    occurrences: tuple[Occurrence, ...]

    @property
    def following(self) -> dict[int, tuple[Occurrence, ...]]:
        """Occurrences grouped by next token, most frequent token first; ties go to the latest."""
        by_token: dict[int, list[Occurrence]] = {}
        for text, at in self.occurrences:
            by_token.setdefault(text[at], []).append((text, at))
        return {
            token: tuple(occurrences) for token, occurrences in sorted(by_token.items(), key=lambda each: -len(each[1]))
        }

    def after(self, token: int) -> "Match":
        """Returns the match of the text extended by this token."""
        occurrences = [(text, at + 1) for text, at in self.following.get(token, ()) if at + 1 < len(text)]
        return Match(self.length + 1, tuple(occurrences))

    @property
    def kind(self) -> tuple[int, int]:
        """Octaves of match length and number of occurrences. Matches of one kind are about equally reliable."""
        return self.length.bit_length(), min(len(self.occurrences), MAX_COUNTED_OCCURRENCES).bit_length()


class SuffixIndex:
    """Search index over several texts."""

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self._texts: deque[list[int]] = deque()
        self._occurrences: defaultdict[int, list[Occurrence]] = defaultdict(list)  # by hash of preceding tokens
        self.tokens = 0

    def add(self, text: list[int]) -> None:
        self._texts.append(text)
        self.grow(0)

    def grow(self, indexed: int) -> None:
        """Indexes the latest text's tokens from index `indexed` on. Only the latest text may grow."""
        text = self._texts[-1]
        self.tokens += len(text) - indexed
        for at in range(max(indexed, self._shortest), len(text)):
            self._occurrences[self._key(text, at)].append((text, at))

    def forget_oldest(self) -> int:
        """Drops the oldest text and returns its length. Its occurrences are first in every list."""
        text = self._texts.popleft()
        self.tokens -= len(text)
        for at in range(self._shortest, len(text)):
            key = self._key(text, at)
            occurrences = self._occurrences[key]
            del occurrences[0]
            if not occurrences:
                del self._occurrences[key]
        return len(text)

    def find(self, text: Sequence[int], longest: int) -> Match:
        """Finds the longest match of the text's suffix, up to `longest` tokens, among the latest MAX_OCCURRENCES."""
        if len(text) < self._shortest:
            return NO_MATCH
        end = list(text[-longest:])
        matches: list[Occurrence] = []
        alike = self._shortest  # verified below, because distinct tokens may have equal hashes
        for occurrence in reversed(self._occurrences.get(self._key(text, len(text)), [])[-MAX_OCCURRENCES:]):
            other, at = occurrence
            if other[at - alike : at] != end[-alike:]:
                continue
            size = _alike(end, other, at, alike)
            if size > alike:
                matches = []
                alike = size
            matches.append(occurrence)
        return Match(alike, tuple(matches)) if matches else NO_MATCH

    def _key(self, text: Sequence[int], end: int) -> int:
        return hash(tuple(text[end - self._shortest : end]))


NO_MATCH = Match(0, ())


def longer(first: Match, second: Match) -> Match:
    """Returns the longer match; combines matches of equal length."""
    if first.length == second.length:
        return Match(first.length, first.occurrences + second.occurrences)
    return max(first, second, key=lambda match: match.length)


def _alike(end: list[int], other: list[int], at: int, matched: int) -> int:
    """Returns the length of the common suffix of `end` and other[:at], given that `matched` tokens match."""
    size = matched
    most = min(len(end), at)
    while size < most and end[-1 - size] == other[at - 1 - size]:
        size += 1
    return size


@dataclass(slots=True)
class _Rate:
    seen: float = 2.0
    missed: float = 1.0


class EscapeRates:
    """Rates, per kind of match, of a next token that has not followed the match before.

    As in PPM compression (Cleary and Witten 1984), with contexts grouped by kind (Bloom 1998).
    """

    def __init__(self) -> None:
        self._rates: defaultdict[tuple[int, int], _Rate] = defaultdict(_Rate)

    def learn(self, match: Match, token: int) -> None:
        """Records that `token` followed the match."""
        rate = self._rates[match.kind]
        if rate.seen >= MAX_OBSERVATIONS:
            rate.seen /= 2
            rate.missed /= 2
        rate.seen += 1
        rate.missed += token not in match.following

    def choices(self, match: Match) -> Choices:
        """Returns the tokens that followed before, with probabilities that sum to the probability of no new token."""
        rate = self._rates[match.kind]
        each = (1 - rate.missed / rate.seen) / len(match.occurrences)
        following = match.following
        return Choices(tuple(following), tuple([each * len(occurrences) for occurrences in following.values()]))


class RecentAnswers:
    """Recent answers of up to `max_tokens` tokens in total; drops the oldest answers first, regardless of salt."""

    def __init__(self, shortest: int, max_tokens: int) -> None:
        self.tokens = 0
        self._shortest = shortest
        self._most = max_tokens
        self._indexes: dict[str, SuffixIndex] = {}  # by cache salt
        self._salts: deque[str] = deque()  # cache salt of each text, oldest first

    def add(self, salt: str, text: list[int]) -> None:
        """Adds the last `max_tokens` tokens of a text."""
        text = text[max(0, len(text) - self._most) :]
        if not text:
            return
        index = self._indexes.setdefault(salt, SuffixIndex(self._shortest))
        index.add(text)
        self._salts.append(salt)
        self.tokens += len(text)
        while self.tokens > self._most:
            self._forget_oldest()

    def find(self, salt: str, text: Sequence[int], longest: int) -> Match:
        """Searches the texts with this salt, like `SuffixIndex.find`."""
        index = self._indexes.get(salt) or SuffixIndex(self._shortest)
        return index.find(text, longest)

    def _forget_oldest(self) -> None:
        salt = self._salts.popleft()
        index = self._indexes[salt]
        self.tokens -= index.forget_oldest()
        if not index.tokens:
            del self._indexes[salt]


def create(draft: DraftPool, setup: DraftSetup) -> "SuffixLookup":
    return SuffixLookup(draft.suffix)


class SuffixLookup:
    """Drafting method that searches the session's text and recent answers.

    Answers drawn by rejection sampling are not stored. Their tokens depend on the noise of the acceptance decisions. If
    the session is reopened here, the same noise decides some of these tokens again, and a draft from the stored answer
    would depend on that noise. Other answers are functions of their prompts and seeds.
    """

    shapes = frozenset(Shape)
    tokens_per_forward = 1
    outcomes = MAX_OUTCOMES

    def __init__(self, options: SuffixOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._lookahead_time = ForwardTime()
        self._texts: dict[str, SessionText] = {}
        self._own: dict[str, SuffixIndex] = {}
        self._answers = RecentAnswers(options.min_ngram, options.remembered_tokens)
        self._rates = EscapeRates()  # shared by all sessions, since rates reveal no tokens

    # ------------------------------------------------------------ sessions

    def open(self, request: Open) -> None:
        self._texts[request.session] = SessionText.begin(request)
        index = SuffixIndex(self._options.min_ngram)
        index.add(self._texts[request.session].tokens)
        self._own[request.session] = index

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        text = self._texts[session].tokens
        self._learn(session, text, tokens)
        indexed = len(text)
        text.extend(tokens)
        self._own[session].grow(indexed)

    def close(self, sessions: Sequence[str]) -> None:
        for name in sessions:
            if self._own.pop(name, None) is not None:
                self._remember(name)
            self._texts.pop(name, None)

    def _remember(self, session: str) -> None:
        """Stores the answer with the last `max_ngram` prompt tokens, so that matches at its start can be found."""
        text = self._texts[session]
        is_free = text.open.takes_trees  # its tokens are independent of acceptance noise
        first = max(0, text.open.prompt_len - self._options.max_ngram)
        if is_free and len(text.tokens) > text.open.prompt_len:
            self._answers.add(text.open.cache_salt, text.tokens[first:])

    def _learn(self, session: str, text: Sequence[int], tokens: Sequence[int]) -> None:
        """Updates the reliability of matches from committed tokens."""
        match = self._find(session, text)
        for index, token in enumerate(tokens):
            if match.occurrences:
                self._rates.learn(match, token)
            match = match.after(token)
            if not match.occurrences:
                match = self._find(session, [*text[-self._options.max_ngram :], *tokens[: index + 1]])

    def _find(self, session: str, text: Sequence[int]) -> Match:
        longest = self._options.max_ngram
        salt = self._texts[session].open.cache_salt
        return longer(self._own[session].find(text, longest), self._answers.find(salt, text, longest))

    # ------------------------------------------------------------ blocks

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [self._begin(request, request.max_tokens) for request in requests]
        self.extend(drafts)
        return [draft.proposal() for draft in drafts]

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """Drafts for likely outcomes.

        Without candidates, proposes an empty block if the target currently decodes the session without blocks.
        """
        drafts = draft_ahead(self, requests, self._lookahead_time, self._clock, interrupted, early)
        return with_empty_proposals(proposals(drafts), requests)

    def _begin(self, request: DraftRequest | LookaheadRequest, max_tokens: int) -> BlockDraft:
        text = self._texts[request.session]
        return BlockDraft(request=request, text=text, base_hash=request.prefix_hash, max_tokens=max_tokens)

    def _match(self, draft: BlockDraft) -> Match:
        """Finds the match of the text extended by the draft's tokens."""
        end = [*draft.text.tokens[-self._options.max_ngram :], *draft.outcome, *draft.tokens]
        return self._find(draft.request.session, end)

    # ------------------------------------------------------------ blocks ahead of a verdict

    def roots(self, request: LookaheadRequest) -> list[BlockDraft]:
        """Returns one root: the main path under verification, with alternatives at each position."""
        block = request.unverified.main_path
        root = self._begin(request, len(block) + 1)
        root.unverified = block
        for token in block:
            match = self._match(root)
            root.append(token, self._rates.choices(match) if match.occurrences else Choices((token,), (1.0,)))
        root.settle()
        return [root]

    def fork(self, root: BlockDraft, outcome: tuple[int, ...], chance: float, max_tokens: int) -> BlockDraft:
        return root.after(outcome, chance, max_tokens)

    def preview(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> None:
        """Does nothing, since a search is as fast as any preview."""

    def extend(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool] = lambda: False) -> list[BlockDraft]:
        """Extends drafts while a match continues; returns the extended drafts."""
        return [draft for draft in drafts if self._extend(draft)]

    def _extend(self, draft: BlockDraft) -> bool:
        drafted = len(draft.drafted)
        matches: dict[TokenPath, Match] = {(): self._match(draft)}

        def after(path: TokenPath) -> Choices:
            if path not in matches:
                matches[path] = matches[path[:-1]].after(path[-1])
            return self._rates.choices(matches[path]) if matches[path].occurrences else NO_CHOICES

        path: TokenPath = ()
        while not draft.is_complete and (choices := after(path)).tokens:
            draft.append(choices.tokens[0], choices)
            path = (*path, choices.tokens[0])
        if draft.takes_trees:
            draft.grown = grow_branches(after, draft.max_tokens, draft.least_chance)
        draft.settle()
        draft.is_cut = True
        return len(draft.drafted) > drafted
