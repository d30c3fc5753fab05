"""All refusals count; each peer and cause is logged once, for a limited number of peers."""

import logging

from cluster.trust import Refusals

LOG = logging.getLogger("refused")


def test_all_refusals_are_counted_and_the_first_of_each_peer_and_cause_is_logged(caplog):
    noted = Refusals(LOG)
    with caplog.at_level(logging.WARNING):
        for peer, cause in [("a", "token")] * 3 + [("a", "role"), ("b", "token")]:
            noted.note(peer, cause, "why")
    assert noted.counts == {"token": 4, "role": 1}
    assert [record.args[:2] for record in caplog.records] == [("a", "token"), ("a", "role"), ("b", "token")]


def test_only_recent_peers_are_remembered(caplog):
    noted = Refusals(LOG)
    for number in range(10_000):
        noted.note(f"peer {number}", "token")
    assert noted.counts.total() == 10_000
    caplog.clear()
    for number in (0, 9_999):
        noted.note(f"peer {number}", "token")
    assert [record.args[0] for record in caplog.records] == ["peer 0"], "the forgotten one is logged again"
