"""The demo's data: support requests and replay examples."""

import pytest

from serve_app.demo_data.support import support_requests


def test_support_requests_differ_and_follow_the_seed() -> None:
    requests = support_requests(360, seed=1)
    assert len(set(requests)) == 360
    assert requests == support_requests(360, seed=1)
    assert requests[:100] != support_requests(100, seed=2)
    assert len(set(support_requests(2048))) == 2048
    with pytest.raises(ValueError, match="2048 support requests"):
        support_requests(2049)
