"""Every error that Slipstream raises on purpose.

SlipstreamError
|- ConfigError           the configuration is wrong; nothing was started
|- ModelError            a checkpoint cannot be used as asked
|- RequestError          a request is wrong; carries the field at fault
|- GrammarError          a grammar cannot be kept to; says why
|- CapacityError         no room now; trying later may help
|- DrainingError         this server is stopping; another may take the request
|- TargetLostError       a session's target replicas failed too often, or none is left
|- ProtocolError         a peer speaks another language or works for another model
|- NonFiniteLogitsError  the model computed NaN or infinite logits for a request
`- EngineError           a model step failed; the replica that raised it must be replaced
"""


class SlipstreamError(Exception):
    """Base of all deliberate errors."""


class ConfigError(SlipstreamError):
    """The configuration is wrong; the message names the key."""


class ModelError(SlipstreamError):
    """A checkpoint cannot be used as asked."""


class RequestError(SlipstreamError):
    """A request cannot be served as asked; `field` names what is wrong in it, and `code` in which way."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class GrammarError(SlipstreamError):
    """A grammar is malformed, cannot be met by any text, or takes more work than is allowed."""


class CapacityError(SlipstreamError):
    """There is no room for this now."""


class DrainingError(SlipstreamError):
    """The server is stopping: it finishes what runs and takes nothing new."""


class TargetLostError(SlipstreamError):
    """The session cannot continue on any target replica."""


class NonFiniteLogitsError(SlipstreamError):
    """The model computed NaN or infinite logits for a request, which no retry changes."""


class ProtocolError(SlipstreamError):
    """A peer cannot be talked to."""


class EngineError(SlipstreamError):
    """A model step failed."""
