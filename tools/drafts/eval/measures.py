"""Measures of a draft over replayed texts: agreement, tokens per verification, and time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.drafts.eval.replay import AskedPlace, verifies

BEST = 4  # agreement is reported for up to this many first tokens of a tree


@dataclass(frozen=True, slots=True)
class DraftMeasures:
    """Measures of one draft at one temperature."""

    draft: str
    method: str
    temperature: float
    positions: int  # positions where a draft was requested
    offered: float  # share of positions with a proposal
    agreement: tuple[float, ...]  # share where the right token is among a tree's first 1, 2, ... tokens
    chains: Mapping[int, float]  # tokens per verification, by block length
    trees: Mapping[int, float]  # tokens per verification, by number of nodes
    token_s: float | None  # seconds per token of a chain; None: it drafted nothing
    tree_s: float | None  # seconds per tree
    states_bytes: int  # per token, on the wire


def measures(
    draft: str,
    method: str,
    temperature: float,
    texts: Sequence[Sequence[AskedPlace]],
    block_lens: Sequence[int],
    nodes: Sequence[int],
    states_bytes: int,
) -> DraftMeasures:
    """Computes the measures over all positions of all texts where a block has room."""
    places = [place for text in texts for place in text if place.room > 0]
    chained = sum(len(place.chain) for place in places)
    grown = sum(len(place.tree) > 0 for place in places)
    return DraftMeasures(
        draft=draft,
        method=method,
        temperature=temperature,
        positions=len(places),
        offered=sum(len(place.chain) + len(place.tree) > 0 for place in places) / len(places),
        agreement=tuple(sum(_rank(place) < best for place in places) / len(places) for best in range(1, BEST + 1)),
        chains={most: _tokens_a_verify(texts, most, trees=False) for most in block_lens},
        trees={most: _tokens_a_verify(texts, most, trees=True) for most in nodes},
        token_s=sum(place.chain_s for place in places) / chained if chained else None,
        tree_s=sum(place.tree_s for place in places) / grown if grown else None,
        states_bytes=states_bytes,
    )


def _rank(place: AskedPlace) -> float:
    """Returns the rank of the right token among the tokens offered next, from 0; infinity if absent."""
    first = place.tree.children(-1) or place.chain.children(-1)
    return first.index(place.coming[0]) if place.coming[0] in first else float("inf")


def _tokens_a_verify(texts: Sequence[Sequence[AskedPlace]], most: int, *, trees: bool) -> float:
    return sum(map(len, texts)) / sum(verifies(text, most, trees=trees) for text in texts)
