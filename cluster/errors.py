"""Errors that Slipstream raises deliberately."""


class SlipstreamError(Exception):
    """Base class of Slipstream's errors."""


class ConfigError(SlipstreamError):
    """The configuration is invalid; the message names the key."""


class ModelError(SlipstreamError):
    """A checkpoint cannot be used as requested."""


INVALID_VALUE = "invalid_value"  # OpenAI's error code of a value that is out of range


class RequestError(SlipstreamError):
    """A request is invalid; `field` names the invalid field, and `code` is the error code."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class GrammarError(SlipstreamError):
    """A grammar is malformed, cannot be satisfied, or exceeds its compute limit."""


class CapacityError(SlipstreamError):
    """No capacity at present; a later retry may succeed."""


class DrainingError(SlipstreamError):
    """The server is shutting down: it finishes running requests and accepts no new ones."""


class TargetLostError(SlipstreamError):
    """The session cannot continue on any target replica."""


class NonFiniteLogitsError(SlipstreamError):
    """The model computed NaN or infinite logits for a request; a retry would fail alike."""


class ProtocolError(SlipstreamError):
    """A peer is incompatible or violated the protocol."""


class EngineError(SlipstreamError):
    """A model step failed; the replica must be replaced."""
