"""Drafts with a method whose tokenizer differs from the target's."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from cluster.drafting.method import DraftingMethod, Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal, max_draft_tokens, with_empty_proposals
from cluster.drafting.translation import TranslatedText, Translator
from cluster.drafting.trees import TokenPath, likeliest_of, tree_of
from protos.draft_tree import NO_TREE, DraftTree
from protos.frozen import value
from protos.messages import NO_RULES, NO_SCORING, DraftRequest, Open, Shape
from protos.prefix import hashes_after

NO_LIMIT = 1 << 30  # session length limit, since the limit in draft tokens is unknown


class RewritableMethod(DraftingMethod, Protocol):
    """A drafting method whose sessions may change at their ends."""

    def rewrite(self, session: str, length: int, tokens: Sequence[int]) -> None:
        """Replaces a session's tokens after the first `length`."""
        ...


@value
class _DraftedPath:
    """Draft tokens sent to the target, after the first `length` draft tokens of a session."""

    length: int
    tokens: TokenPath


class TranslatedMethod:
    """Adapts a drafting method with another vocabulary to the target's tokens. Its sessions may have different targets.

    `method` sees only its own token ids: every message is translated on the way in, and every block on the way out.
    Under rejection sampling it drafts nothing, because the probabilities of translated tokens are unknown.
    """

    def __init__(
        self,
        method: RewritableMethod,
        translator_of: Callable[[Open], Translator],
        texts: dict[str, TranslatedText] | None = None,  # to share with the method: texts by session
    ) -> None:
        self._method = method
        self._translator_of = translator_of
        self._open: dict[str, Open] = {}
        self._texts = {} if texts is None else texts
        self._sent: dict[str, dict[int, _DraftedPath]] = {}  # by session and prefix hash: latest proposals

    @property
    def shapes(self) -> frozenset[Shape]:
        return self._method.shapes

    @property
    def tokens_per_forward(self) -> int:
        return self._method.tokens_per_forward

    # ------------------------------------------------------------ sessions

    def open(self, request: Open) -> None:
        text = TranslatedText.begin(
            self._translator_of(request), request.hash_key, request.tokens, request.prompt_len, request.draft_prompt
        )
        self._open[request.session] = request
        self._texts[request.session] = text
        self._method.open(_inner_open(request, text))

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        text = self._texts[session]
        length = text.extend(tokens)
        self._method.rewrite(session, length, text.prefix.tokens[length:])

    def close(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            for by_session in (self._open, self._texts, self._sent):
                by_session.pop(session, None)
        self._method.close(sessions)

    # ------------------------------------------------------------ blocks

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        wanted = [request for request in requests if self._can_draft(request.session)]
        drafted = {each.session: each for each in self._method.draft([self._inner(each) for each in wanted])}
        proposals = []
        for request in requests:
            self._sent[request.session] = {}
            inner = drafted.get(request.session)
            proposals.append(_empty(request) if inner is None else self._block(request, inner))
        return proposals

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        wanted = {request.session: request for request in requests if self._can_draft(request.session)}
        inner = [self._inner_lookahead(request) for request in wanted.values()]
        for session in wanted:
            self._sent[session] = {}

        def translated(proposals: Iterable[Proposal]) -> list[Proposal]:
            found: dict[tuple[str, TokenPath], Proposal] = {}
            for proposal in proposals:
                block = self._block_ahead(wanted[proposal.session], proposal)
                if block is not None:
                    found.setdefault((block.session, block.outcome), block)
            return list(found.values())

        drafted = self._method.draft_ahead(inner, interrupted, lambda so_far: early(translated(so_far)))
        return with_empty_proposals(translated(drafted), requests)

    def _can_draft(self, session: str) -> bool:
        return not self._open[session].uses_draft_probs and self._texts[session].prefix.length > 0

    def _inner(self, request: DraftRequest) -> DraftRequest:
        prefix = self._texts[request.session].prefix
        return replace(request, base_len=prefix.length, prefix_hash=prefix.hash)

    def _inner_lookahead(self, request: LookaheadRequest) -> LookaheadRequest:
        """Returns the request with the draft tokens under verification, if they are known."""
        prefix = self._texts[request.session].prefix
        path = self._sent.get(request.session, {}).get(request.prefix_hash)
        tokens: TokenPath = ()
        if path is not None and path.length <= prefix.length:
            committed = tuple(prefix.tokens[path.length :])
            if path.tokens[: len(committed)] == committed:
                tokens = path.tokens[len(committed) :]
        return replace(
            request,
            base_len=prefix.length,
            prefix_hash=prefix.hash,
            unverified=DraftTree.chain(tokens) if tokens else NO_TREE,
            chances=(),
        )

    def _block(self, request: DraftRequest, inner: Proposal) -> Proposal:
        """Returns the target's block for the draft's block."""
        paths = self._paths(request.session, (), inner, ())
        chosen = likeliest_of(paths, request.max_tokens, request.least_chance)
        if not chosen:
            return _empty(request)
        self._sent[request.session][request.prefix_hash] = _DraftedPath(inner.base_len, inner.tree.main_path)
        return replace(
            inner,
            base_len=request.base_len,
            prefix_hash=request.prefix_hash,
            tree=tree_of(chosen),
            chances=tuple([chance for _, chance in chosen]),
        )

    def _block_ahead(self, request: LookaheadRequest, inner: Proposal) -> Proposal | None:
        """Returns the target's block and outcome for a block that the method drafted ahead; None without a token.

        The outcome ends at the first token outside the block under verification.
        """
        session = request.session
        whole = [token for token, _ in self._texts[session].translated((*inner.outcome, *inner.tree.main_path))]
        accepted = len(request.unverified.along(whole))
        outcome = tuple(whole[: accepted + 1])
        opened = self._open[session]
        base_len = request.base_len + len(outcome)
        longest = min(request.max_tokens, max_draft_tokens(opened, base_len))
        if len(whole) <= accepted + 1 or longest <= 0 or not set(opened.stop_ids).isdisjoint(outcome):
            return None
        paths = self._paths(session, inner.outcome, inner, outcome)
        chosen = likeliest_of(paths, longest, request.least_chance)
        if not chosen:
            return None
        prefix_hash = hashes_after(request.prefix_hash, outcome)[-1]
        length = inner.base_len - len(inner.outcome)
        self._sent[session][prefix_hash] = _DraftedPath(length, (*inner.outcome, *inner.tree.main_path))
        return replace(
            inner,
            base_len=base_len,
            prefix_hash=prefix_hash,
            outcome=outcome,
            tree=tree_of(chosen),
            chances=tuple([chance for _, chance in chosen]),
        )

    def _paths(self, session: str, before: TokenPath, inner: Proposal, outcome: TokenPath) -> dict[TokenPath, float]:
        """Returns the target's paths after `outcome`, with their probabilities.

        `before` are draft tokens before the block. Translates whole branches only: the translation of a part may end
        with other tokens.
        """
        text = self._texts[session]
        tree = inner.tree
        parents = set(tree.parents)
        paths: dict[TokenPath, float] = {}
        for nodes in tree.paths:
            if nodes[-1] in parents:
                continue
            drafted = [tree.tokens[node] for node in nodes]
            path: TokenPath = ()
            reached = 1.0
            for position, (token, last) in enumerate(text.translated((*before, *drafted))):
                if position < len(outcome):
                    if token != outcome[position]:
                        break
                    continue
                node = last - len(before)
                reached = min(reached, inner.chances[nodes[node]] if node >= 0 else 1.0)
                path = (*path, token)
                paths[path] = max(paths.get(path, 0.0), reached)
        return paths


def _empty(request: DraftRequest) -> Proposal:
    return Proposal(request.session, request.base_len, request.prefix_hash, NO_TREE)


def _inner_open(request: Open, text: TranslatedText) -> Open:
    """Returns the session in the draft's tokens, without parameters that name the target's tokens."""
    sampling = replace(request.sampling, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0)
    return replace(
        request,
        tokens=tuple(text.prefix.tokens),
        prompt_len=text.prefix.length,
        max_len=NO_LIMIT,
        stop_ids=(),
        sampling=sampling,
        rules=NO_RULES,
        scoring=NO_SCORING,
        grammar="",
        draft_prompt=(),
    )
