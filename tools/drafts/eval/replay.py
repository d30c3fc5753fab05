"""Replay of a decided text, requesting drafts from a method at each position.

Under Gumbel coupling the committed tokens do not depend on the drafts: the target's token is a function of the tokens
before it and of the seed. So a verification is a comparison with the text, and many drafts are measured over one text.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.drafting.method import DraftingMethod, ReadsStates
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import DraftRequest, Shape
from protos.prefix import Prefix
from tools.drafts.eval.measured_target import DecodedText


@dataclass(frozen=True, slots=True)
class AskedPlace:
    """A method's drafts after a prefix of a text, and what the text continued with."""

    room: int  # most tokens of a block here
    coming: tuple[int, ...]  # the text's own next tokens
    chain: DraftTree
    tree: DraftTree
    chain_s: float  # seconds to draft the chain
    tree_s: float


def replay(
    method: DraftingMethod,
    text: DecodedText,
    block_len: int,
    nodes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[AskedPlace]:
    """Requests a chain of `block_len` and a tree of `nodes` tokens at each position after the prompt.

    A method that reads hidden states gets those of all tokens but the last. It has none right after the prompt, which
    the target has not read at that point.
    """
    opened = text.open
    method.open(opened)
    prefix = Prefix(opened.hash_key, opened.tokens)
    row_bytes = method.states_format.row_bytes if isinstance(method, ReadsStates) else 0
    sent = 0
    found = []
    for length in range(opened.prompt_len, len(text.tokens)):
        if length > opened.prompt_len:
            method.committed(opened.session, text.tokens[length - 1 : length])
            prefix.extend(text.tokens[length - 1 : length])
            if isinstance(method, ReadsStates):
                method.states(opened.session, sent, text.states[sent * row_bytes : (length - 1) * row_bytes])
                sent = length - 1
        is_ready = length > opened.prompt_len or not row_bytes
        found.append(_asked(method, text, prefix, block_len if is_ready else 0, nodes if is_ready else 0, clock))
    method.close([opened.session])
    return found


def _asked(
    method: DraftingMethod, text: DecodedText, prefix: Prefix, block_len: int, nodes: int, clock: Callable[[], float]
) -> AskedPlace:
    room = text.open.max_len - prefix.length - 1

    def ask(shape: Shape, most: int) -> tuple[DraftTree, float]:
        if min(most, room) < 1 or shape not in method.shapes:
            return NO_TREE, 0.0
        request = DraftRequest(text.open.session, 1, prefix.length, prefix.hash, min(most, room), shape=shape)
        began = clock()
        (proposal,) = method.draft([request])
        return proposal.tree, clock() - began

    (chain, chain_s) = ask(Shape.CHAIN, block_len)
    (tree, tree_s) = ask(Shape.TREE, nodes)
    return AskedPlace(room, text.tokens[prefix.length :], chain, tree, chain_s, tree_s)


def committed_by(place: AskedPlace, draft: DraftTree, most: int) -> int:
    """Returns how many tokens one verification of the draft's first `most` tokens would have committed."""
    accepted = len(draft.first(min(most, place.room)).along(place.coming))
    return min(accepted + 1, len(place.coming))


def verifies(places: Sequence[AskedPlace], most: int, *, trees: bool) -> int:
    """Counts the verifications needed for a text with blocks of `most` tokens."""
    count = 0
    at = 0
    while at < len(places):
        place = places[at]
        at += committed_by(place, place.tree if trees else place.chain, most)
        count += 1
    return count
