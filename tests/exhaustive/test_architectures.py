"""Every architecture is computed right or refused before a step, as docs/models.md says."""

import pytest

from tests.exhaustive.architectures import CASES, try_architecture, written_outcomes

WRITTEN = written_outcomes()


@pytest.mark.parametrize("name", CASES)
def test_an_architecture_is_exact_or_refused_as_written(name):
    """A changed outcome is written into the page by `make model-table`, to be read before it is committed."""
    outcome = try_architecture(name)
    assert outcome.kind in {"exact", "refused", "not built"}, outcome.reason
    assert outcome.kind == WRITTEN[name].kind, outcome.reason
