"""API key settings of a deployment: the digest of each client key, with limits of its own."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]


class ApiKey(BaseModel):
    """One client's key, as its digest.

    No configuration holds the key itself; `slipstream key` makes a key and its digest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal digits")
    max_sessions: Positive | None = Field(
        None, description="sessions in flight per router that this key may have; more get 429"
    )
    max_tokens: Positive | None = Field(
        None, description="most tokens of one answer; who asks for more gets 400, who asks for no number this one"
    )
    cache_salt: str | None = Field(
        None,
        description="whose cached prefixes this key's prompts may find: those of keys with the same salt; default: of"
        " this key alone",
    )
