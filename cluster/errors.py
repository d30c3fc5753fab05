"""Errors that Slipstream raises deliberately.

SlipstreamError
|- ConfigError           the configuration is wrong; nothing was started
|- ModelError            a checkpoint cannot be used as asked
|- RequestError          a request is wrong; carries the field at fault
|- GrammarError          a grammar cannot be met; the message gives the reason
|- CapacityError         no capacity now; trying later may help
|- DrainingError         this server is stopping; another may take the request
|- TargetLostError       a session's target replicas failed too often, or none is left
|- ProtocolError         a peer has another protocol version or another model
|- NonFiniteLogitsError  the model computed NaN or infinite logits for a request
`- EngineError           a model step failed; the replica that raised it must be replaced
"""


class SlipstreamError(Exception):
    """Base class of Slipstream's errors."""


class ConfigError(SlipstreamError):
    """The configuration is invalid; the message names the key."""


class ModelError(SlipstreamError):
    """A checkpoint cannot be used as requested."""


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
