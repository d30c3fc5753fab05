"""Shared setup of attention tests."""

import pytest


@pytest.fixture(autouse=True)
def _flex_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables flex attention's tracing, which takes seconds even without compilation."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
