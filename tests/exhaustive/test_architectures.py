"""Every architecture is exact or refused before the first step, as docs/models.md states."""

import pytest

from tests.exhaustive.architectures import CASES, try_architecture, written_outcomes

WRITTEN = written_outcomes()


@pytest.mark.parametrize("name", CASES)
def test_an_architecture_is_exact_or_refused_as_written(name):
    """After a change, run `make model-table` and review the updated page."""
    outcome = try_architecture(name)
    assert outcome.kind in {"exact", "refused", "not built"}, outcome.reason
    assert (outcome.kind, outcome.support) == (WRITTEN[name].kind, WRITTEN[name].support), outcome.reason
