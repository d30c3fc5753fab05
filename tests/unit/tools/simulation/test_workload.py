"""Tests a load's token rate, which is the value of a second."""

from dataclasses import replace

import pytest

from cluster.speculation.estimators import Load
from tests.unit.cluster.speculation.samples import LOAD


def test_the_rate_follows_the_concurrency():
    assert LOAD.rate == pytest.approx(15.0)
    assert replace(LOAD, sessions=11).rate == pytest.approx(1.5 * 11 / 0.110)
    assert replace(LOAD, gain=0.5).rate == pytest.approx(10.0), "a second is worth plain decoding at least"
    assert Load().rate == 0.0
