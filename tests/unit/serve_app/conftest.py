"""Provides the toy tokenizer and its codec, built once, and restores loggers after each test."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.api.text import TextCodec
from serve_app.startup import PACKAGES
from tests.byte_tokenizer import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer, (tokenizer.eos_token_id,))


@pytest.fixture(autouse=True)
def _restored_loggers() -> Iterator[None]:
    """Restores the packages' loggers, which deployments change at start and other tests read through `caplog`."""
    loggers = [logging.getLogger(package) for package in PACKAGES]
    parents = [logger.parent for logger in loggers]
    yield
    for logger, parent in zip(loggers, parents, strict=True):
        logger.parent = parent
