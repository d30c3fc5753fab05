"""Every error that Slipstream raises on purpose.

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
    """Base of all errors that Slipstream raises on purpose."""


class ConfigError(SlipstreamError):
    """The configuration is wrong; the message names the key."""


class ModelError(SlipstreamError):
    """A checkpoint cannot be used as asked."""


class RequestError(SlipstreamError):
    """A request cannot be served as asked; `field` names the field at fault, and `code` the kind of fault."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class GrammarError(SlipstreamError):
    """A grammar is malformed, cannot be met by any text, or exceeds the allowed work."""


class CapacityError(SlipstreamError):
    """No capacity at present; trying later may help."""


class DrainingError(SlipstreamError):
    """The server is stopping: it finishes running requests and accepts no new ones."""


class TargetLostError(SlipstreamError):
    """The session cannot continue on any target replica."""


class NonFiniteLogitsError(SlipstreamError):
    """The model computed NaN or infinite logits for a request, which no retry changes."""


class ProtocolError(SlipstreamError):
    """A peer is incompatible or broke the protocol."""


class EngineError(SlipstreamError):
    """A model step failed; the replica must be replaced."""
