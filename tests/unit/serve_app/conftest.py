"""The toy tokenizer and its codec, built once."""

from typing import Any

import pytest

from serve_app.api.text import TextCodec
from tests.byte_tokenizer import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer, (tokenizer.eos_token_id,))
