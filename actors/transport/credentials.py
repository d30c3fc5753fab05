"""Authentication of peers: by certificates, by a shared token, or, on one machine, none.

The rest of the transport uses a `Credentials` to listen, to dial, and to check callers.
"""

import hmac
import ipaddress
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import grpc

from actors.transport.certificate_files import CertificateFiles, CertificateSet
from actors.transport.channel_options import CHANNEL_OPTIONS
from cluster.errors import ConfigError
from cluster.trust.options import TrustConfig
from cluster.trust.roles import PeerRole, roles_of

log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]

AUTHORIZATION = "authorization"
EVERY_ROLE = frozenset(PeerRole)


def ignore() -> None:
    """Does nothing; the default for callers that do not count handshakes."""


class Credentials(Protocol):
    """Credentials of one process in its role."""

    @property
    def metadata(self) -> Metadata:
        """Metadata sent with each stream that we open."""
        ...

    def listen(self, server: grpc.aio.Server, host: str, port: int, begins: Callable[[], None] = ignore) -> int:
        """Binds a server; returns the port. `begins` is called, in any thread, as each TLS handshake begins."""
        ...

    def dial(self, address: str, peer: PeerRole) -> grpc.aio.Channel:
        """Returns a channel to a peer, which must prove its role."""
        ...

    def belongs(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Returns whether a caller with this metadata may be answered at all."""
        ...

    def roles(self, auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[PeerRole]:
        """Returns the roles in which a caller may act whose connection proves this."""
        ...


class NoCredentials:
    """Trusts every caller; without `insecure`, it listens only on loopback addresses."""

    metadata: Metadata = ()

    def __init__(self, insecure: bool = False) -> None:
        self._insecure = insecure

    def listen(self, server: grpc.aio.Server, host: str, port: int, begins: Callable[[], None] = ignore) -> int:
        if not self._insecure and not is_loopback(host):
            raise ConfigError(
                f"trust: a gRPC server is to listen on {host}, beyond this machine, and nothing says whom it may trust;"
                " give trust.certificates or trust.token_file, or trust.insecure: true if all of its network is trusted"
            )
        return server.add_insecure_port(f"{host}:{port}")

    def dial(self, address: str, peer: PeerRole) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    def belongs(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        return True

    def roles(self, auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[PeerRole]:
        return EVERY_ROLE


class TokenFile:
    """Accepts every caller with the shared token, in any role; nothing is encrypted."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file holds no token."""
        self._path = path
        self._tokens = self._read()

    @property
    def metadata(self) -> Metadata:
        return ((AUTHORIZATION, f"Bearer {self._current()[0]}"),)

    def listen(self, server: grpc.aio.Server, host: str, port: int, begins: Callable[[], None] = ignore) -> int:
        return server.add_insecure_port(f"{host}:{port}")

    def dial(self, address: str, peer: PeerRole) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    def belongs(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        said = next((value for key, value in metadata if key == AUTHORIZATION), "")
        presented = said.encode() if isinstance(said, str) else said
        # Compares with all tokens, in constant time each, so that the duration reveals nothing.
        matches = [hmac.compare_digest(presented, f"Bearer {token}".encode()) for token in self._current()]
        return any(matches)

    def roles(self, auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[PeerRole]:
        return EVERY_ROLE

    def _current(self) -> tuple[str, ...]:
        """Reloads the file; keeps the old tokens if it is unreadable."""
        try:
            self._tokens = self._read()
        except ConfigError as error:
            log.error("the tokens before it stay in use: %s", error)
        return self._tokens

    def _read(self) -> tuple[str, ...]:
        try:
            tokens = tuple(self._path.read_text("ascii").split())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"trust.token_file: cannot read {self._path}: {error}") from error
        if not tokens:
            raise ConfigError(f"trust.token_file: {self._path} is empty; expected a token in each line")
        return tokens


class MutualTls:
    """Mutual TLS: both sides present certificates of the same authority, which contain their roles."""

    metadata: Metadata = ()

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files

    def listen(self, server: grpc.aio.Server, host: str, port: int, begins: Callable[[], None] = ignore) -> int:
        served = self._files.current()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            """Called at each handshake; returns the new configuration, or None to keep the current one."""
            nonlocal served
            begins()
            found = self._files.current()
            if found == served:
                return None
            served = found
            return _server_configuration(found)

        offered = grpc.dynamic_ssl_server_credentials(
            _server_configuration(served),
            newer,  # type: ignore[arg-type]  # None, missing in the stubs, keeps the current one
            require_client_authentication=True,
        )
        return server.add_secure_port(f"{host}:{port}", offered)

    def dial(self, address: str, peer: PeerRole) -> grpc.aio.Channel:
        """Dials with the role as the expected name: addresses are those of pods, which no certificate contains."""
        found = self._files.current()
        shown = grpc.ssl_channel_credentials(found.authority, found.key, found.certificate)
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer.name_in_certificate))
        return grpc.aio.secure_channel(address, shown, options=options)

    def belongs(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        return True  # otherwise the handshake would have failed

    def roles(self, auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[PeerRole]:
        names = auth_context.get("x509_subject_alternative_name", ())
        return roles_of(name.decode(errors="replace") for name in names)


def _server_configuration(found: CertificateSet) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.certificate)], found.authority)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def credentials_of(trust: TrustConfig, role: PeerRole) -> Credentials:
    """Creates the configured credentials. Raises ConfigError if files are missing or unusable."""
    if trust.certificates is not None:
        return MutualTls(CertificateFiles(Path(trust.certificates.replace("{role}", role.value))))
    if trust.token_file is not None:
        return TokenFile(Path(trust.token_file))
    return NoCredentials(trust.insecure)
