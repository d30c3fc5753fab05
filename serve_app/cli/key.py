"""A new API key, and what the configuration is to hold of it."""

import hashlib
import secrets

KEY_BYTES = 32


def new_key() -> str:
    """256 random bits, so that its digest needs no salt."""
    return f"sk-{secrets.token_urlsafe(KEY_BYTES)}"


def key_lines(name: str, key: str) -> str:
    """The section of the configuration for a key."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"server:\n  keys:\n    {name}: {{sha256: {digest}}}"
