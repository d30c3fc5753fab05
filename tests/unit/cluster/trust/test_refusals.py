"""Refusals: all are counted, each is logged once a peer and cause, and what is remembered is bounded."""

import logging

from cluster import trust
from cluster.trust import Refusals

LOG = logging.getLogger("refused")


def test_all_are_counted_and_the_first_of_a_peer_is_logged(caplog):
    noted = Refusals(LOG)
    with caplog.at_level(logging.WARNING):
        for peer, cause in [("a", "token")] * 3 + [("a", "role"), ("b", "token")]:
            noted.note(peer, cause, "why")
    assert noted.counts == {"token": 4, "role": 1}
    assert [record.args[:2] for record in caplog.records] == [("a", "token"), ("a", "role"), ("b", "token")]


def test_peers_without_end_fill_no_memory(monkeypatch):
    monkeypatch.setattr(trust, "REMEMBERED", 3)
    noted = Refusals(LOG)
    for number in range(100):
        noted.note(f"peer {number}", "token")
    assert len(noted._logged) == 3
    assert noted.counts.total() == 100
