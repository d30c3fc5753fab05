"""Tests the order of failures without injecting any."""

import random

from tests.chaos.deck import Deck

KINDS = ("drafter killed", "node killed", "stream cut", "target killed")


def drawn(deck: Deck, times: int) -> list[str | None]:
    return [deck.draw(lambda kind: True) for _ in range(times)]


def test_each_kind_is_dealt_once_per_round() -> None:
    deck = Deck(KINDS, random.Random(1))
    rounds = [drawn(deck, len(KINDS)) for _ in range(20)]
    assert all(set(one) == set(KINDS) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


def test_a_postponed_kind_is_dealt_before_the_next_round() -> None:
    deck = Deck(KINDS, random.Random(1))
    early = [deck.draw(lambda kind: kind != "node killed") for _ in range(len(KINDS))]
    assert early[-1] is None
    assert set(early[:-1]) == {*KINDS} - {"node killed"}
    assert drawn(deck, 1) == ["node killed"]
    assert set(drawn(deck, len(KINDS))) == set(KINDS)


def test_a_seed_determines_the_order() -> None:
    assert drawn(Deck(KINDS, random.Random(7)), 12) == drawn(Deck(KINDS, random.Random(7)), 12)
