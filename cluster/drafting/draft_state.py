"""State of a block in progress: final and replaceable tokens, and the value of another forward pass."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from cluster.drafting.requests import LookaheadRequest, Proposal, SessionText
from cluster.drafting.trees import Branch, Choices, likeliest_paths, threshold_of, tree_of
from protos.draft_tree import DraftTree, SparseProbs
from protos.frozen import value
from protos.messages import DraftRequest, Shape
from protos.prefix import hashes_after

REPREDICTION_VALUE = 0.25  # relative value of a forward pass that replaces a recurrent head's predictions


@value
class DraftedToken:
    """A drafted token with the candidates at its position."""

    token: int
    choices: Choices  # candidates at this position
    p_accepted: float  # cumulative acceptance probability, estimated by the draft model
    ids: tuple[int, ...] = ()  # token ids of draft_probs, with `weights`; rejection sampling only
    weights: tuple[int, ...] = ()
    by_head: bool = False  # True: predicted by a draft head, without a forward pass of the model
    state: Any = None  # private to the method: state for a draft head to continue from


@dataclass(kw_only=True, eq=False)
class BlockDraft:
    """A block in progress.

    A *root* is the block that the target is verifying; the method reads it token by token to predict verdicts. A block
    may have *branches*, which continue from alternatives to its tokens; each is drafted like a separate block.
    """

    request: DraftRequest | LookaheadRequest
    text: SessionText  # committed text; does not change while the block is drafted
    base_hash: int  # hash of the tokens before the block
    max_tokens: int
    outcome: tuple[int, ...] = ()  # assumed verdict tokens before the block
    chance: float = 1.0  # estimated probability of `outcome`
    state: Any = None  # private to the method: state at the position before the block
    unverified: tuple[int, ...] | None = None  # root only: tokens under verification
    needs_read_for_choices: bool = False  # root only: True if its alternatives are known only after it has been read
    main: "BlockDraft | None" = None  # root off the main path: root of the main path
    stem: tuple[int, ...] = ()  # branch only: preceding tokens; the last one is off the main path
    branches: list["BlockDraft"] = field(default_factory=list)
    grown: list[Branch] = field(default_factory=list)  # finished branches
    min_confidence: float = 0.0  # minimum cumulative probability; the block ends below it
    drafted: list[DraftedToken] = field(default_factory=list)
    settled: int = 0  # number of final tokens; later tokens are replaceable predictions of a draft head
    is_guessed: bool = False  # True if a draft head predicted the tokens after `settled`
    is_cut: bool = False  # True if the block ends early: the next token is too unlikely or its logits are non-finite
    estimates_first: bool = True  # True if a draft model estimated the first token's probability
    sends_probs: bool = field(init=False)  # True under rejection sampling, which needs draft_probs

    def __post_init__(self) -> None:
        self.sends_probs = self.text.open.uses_draft_probs

    @property
    def lookahead(self) -> LookaheadRequest:
        """The lookahead request; valid only for blocks drafted ahead of a verdict."""
        assert isinstance(self.request, LookaheadRequest), "only blocks drafted ahead have a lookahead request"
        return self.request

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple([token.token for token in self.drafted])

    @property
    def last(self) -> tuple[Any, int]:
        """(state, token): the last token and the state it was drawn from. An empty block uses the token before the
        block.
        """
        if self.drafted:
            return self.drafted[-1].state, self.drafted[-1].token
        return self.state, (self.outcome or self.text.tokens)[-1]

    @property
    def choices(self) -> list[Choices]:
        return [token.choices for token in self.drafted]

    @property
    def by_model(self) -> list[DraftedToken]:
        """Leading main-path tokens predicted by the model rather than a draft head."""
        return list(takewhile(lambda token: not token.by_head, self.drafted[: len(self.tree.main_path)]))

    @property
    def is_root(self) -> bool:
        return self.unverified is not None

    @property
    def p_accepted(self) -> float:
        """Probability that all drafted tokens are accepted."""
        return self.drafted[-1].p_accepted if self.drafted else 1.0

    @property
    def prefix_hash(self) -> int:
        """Hash of all tokens, drafted ones included."""
        return hashes_after(self.base_hash, self.tokens)[-1] if self.drafted else self.base_hash

    @property
    def missing(self) -> int:
        """Number of tokens left for forward passes to predict."""
        return self.max_tokens - self.settled

    @property
    def is_complete(self) -> bool:
        """True if no more tokens can be added."""
        return self.is_cut or len(self.drafted) == self.max_tokens

    def is_consecutive_prediction(self, offset: int) -> bool:
        """Returns True if no forward pass separates the token `offset` positions ahead from a predicted token before
        it.
        """
        return self.is_guessed or (offset > 0 and not self.is_root)

    @property
    def is_done(self) -> bool:
        """True if no more tokens can be added and another forward pass would not improve the block."""
        return self.is_complete and (self.sends_probs or not self.is_guessed)

    @property
    def least_chance(self) -> float:
        """Minimum cumulative probability of a token worth sending; relative to the stem in a branch."""
        if self.sends_probs or self.is_root:
            return 0.0
        return self.request.least_chance / self.chance if self.stem else self.request.least_chance

    @property
    def urgency(self) -> float:
        """Expected value of the next forward pass.

        Under rejection sampling, it ignores drafted tokens, because they must not influence whether a block is used.
        """
        if self.sends_probs:
            return self.chance
        settled_probability = self.drafted[self.settled - 1].p_accepted if self.settled else 1.0
        return self.chance * settled_probability * (REPREDICTION_VALUE if self.is_complete else 1.0)

    @property
    def position(self) -> int:
        """Position of the next token to draft."""
        return self.base_len + len(self.drafted)

    @property
    def whole_text(self) -> list[int]:
        """All tokens, including prompt and drafted tokens."""
        return [*self.text.tokens, *self.outcome, *self.tokens]

    @property
    def base_len(self) -> int:
        """Number of tokens before the block."""
        return self.request.base_len + len(self.outcome)

    @property
    def next_position(self) -> tuple[int, tuple[int, ...]]:
        """Position of the next token to draft: (number of committed tokens, assumed tokens after them)."""
        return self.request.base_len, self.outcome + self.tokens

    @property
    def takes_trees(self) -> bool:
        """True if the block may be sent as a tree."""
        return self.request.shape is Shape.TREE and not self.is_root and not self.sends_probs

    @property
    def tree(self) -> DraftTree:
        """The draft tree to send."""
        if self.takes_trees and self.drafted:
            return tree_of(self.paths)
        probs = None
        drafted = self.drafted
        if self.sends_probs and drafted and drafted[0].ids:  # deterministic drafts need no probabilities
            probs = SparseProbs(tuple([at.ids for at in drafted]), tuple([at.weights for at in drafted]))
        return DraftTree.chain(self.tokens, probs)

    @property
    def paths(self) -> list[tuple[tuple[int, ...], float]]:
        """Paths to the tree's nodes with their probabilities, likeliest first."""
        return likeliest_paths(self._as_branches(), self.max_tokens, self.least_chance)

    def _as_branches(self) -> list[Branch]:
        whole = Branch((), 1.0, self.tokens, self.choices)
        return [
            whole,
            *[Branch(branch.stem, branch.chance, branch.tokens, branch.choices) for branch in self.branches],
            *self.grown,
        ]

    def append(
        self,
        token: int,
        choices: Choices,
        state: Any = None,
        ids: tuple[int, ...] = (),
        weights: tuple[int, ...] = (),
    ) -> None:
        """Adds a token, or ends the block if the token is too unlikely. A root first adds its tokens under
        verification.
        """
        if self.is_complete:
            return
        if self.unverified is not None and len(self.drafted) < len(self.unverified):
            token = self.unverified[len(self.drafted)]
            choices = choices.including(token, self.lookahead.conditional_chance((*self.tokens, token)))
        p_accepted = self.p_accepted * choices.chances[0]
        if p_accepted < max(self.least_chance, self._least_of_tree):
            self.is_cut = True
            return
        by_head = self.is_guessed
        self.drafted.append(DraftedToken(token, choices, p_accepted, ids, weights, by_head, state))
        self.is_cut = p_accepted < self.min_confidence

    def recall(self, considered: Iterable[DraftedToken]) -> None:
        """Adds earlier predictions at the first positions of a root.

        Stops after the first position where the token under verification differs from the prediction.
        """
        for prediction, token in zip(considered, self.unverified or (), strict=False):
            there = prediction.choices.including(token, self.lookahead.conditional_chance((*self.tokens, token)))
            p_accepted = self.p_accepted * there.chance_of(token)
            self.drafted.append(replace(prediction, token=token, choices=there, p_accepted=p_accepted))
            if token != prediction.token:
                break
        self.settled = len(self.drafted)

    def forget_guesses(self) -> None:
        """Drops the draft head's predictions after the model has read more tokens."""
        del self.drafted[self.settled :]
        self.is_guessed = self.is_cut = False

    def settle(self) -> None:
        """Marks all tokens as final; the next forward pass reads them."""
        self.settled = len(self.drafted)

    def after(self, outcome: tuple[int, ...], chance: float, max_tokens: int) -> "BlockDraft":
        """Returns an empty block after a possible outcome of this root."""
        return BlockDraft(
            request=self.request,
            text=self.text,
            base_hash=hashes_after(self.request.prefix_hash, outcome)[-1],
            max_tokens=max_tokens,
            outcome=outcome,
            chance=chance,
        )

    def proposal(self) -> Proposal:
        is_tree = self.takes_trees and bool(self.drafted)
        paths = self.paths if is_tree else []
        return Proposal(
            session=self.request.session,
            base_len=self.base_len,
            prefix_hash=self.base_hash,
            tree=tree_of(paths) if is_tree else self.tree,
            outcome=self.outcome,
            is_at_once=not self.outcome and bool(self.drafted) and self.drafted[0].by_head,
            confidence=self.confidence,
            chances=tuple([chance for _, chance in paths]) if is_tree else self._chain_chances,
            chance=self.chance,
        )

    @property
    def confidence(self) -> float | None:
        """Probability of the first token; None if the method did not estimate it or had only one candidate."""
        if not self.estimates_first or not self.drafted or len(self.drafted[0].choices.tokens) == 1:
            return None
        return self.drafted[0].choices.chance_of(self.drafted[0].token)

    @property
    def _chain_chances(self) -> tuple[float, ...]:
        return () if self.sends_probs else tuple([token.p_accepted for token in self.drafted])

    @property
    def _least_of_tree(self) -> float:
        """Minimum probability of the next token; a less likely token would not enter the tree."""
        return threshold_of(self.paths, self.max_tokens) if self.takes_trees and self.drafted else 0.0
