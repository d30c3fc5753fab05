"""Trust settings between a deployment's processes: certificates, a shared token, or neither."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]


class TrustConfig(BaseModel):
    """Authentication of routers, drafters and targets on their gRPC streams: `certificates`, `token_file` or neither.

    With neither, servers listen on loopback only, unless `insecure` is set because the network is trusted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    certificates: str | None = Field(
        None,
        description="folder with tls.crt, tls.key and ca.crt, as cert-manager writes them: mutual TLS, with the role in"
        " the certificate; {role} in it stands for router, drafter or target; read again for each connection",
    )
    token_file: str | None = Field(
        None,
        description="file of shared tokens, one a line: the first is sent, each is accepted. It says who belongs here,"
        " not in which role, and nothing is encrypted; read again for each stream",
    )
    insecure: bool = Field(
        False,
        description="whether servers may listen beyond loopback with neither of them: whoever connects is trusted",
    )
    reflection: bool = Field(False, description="whether gRPC servers describe their services to whom they serve")
    max_streams_per_host: Positive = Field(
        256,
        description="streams that one server keeps to peers of one host, those that have not greeted yet among them",
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = {"certificates": self.certificates, "token_file": self.token_file, "insecure": self.insecure or None}
        named = [key for key, value in given.items() if value is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are given, expected at most one of {', '.join(given)}")
        return self

    @property
    def is_off(self) -> bool:
        """True if nothing is configured."""
        return self.certificates is None and self.token_file is None and not self.insecure
