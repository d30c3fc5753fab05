"""Authentication of peers by certificates or a shared token; on one machine, none is required.

The other modules use `Credentials` to listen, to dial, and to check callers.

`CertificateFiles` reads the file layout of cert-manager. Files may be replaced while in use. Kubernetes replaces all
files of a secret at once, but a reader may read one file before the swap and another after it. If certificate and key
do not match, the previous set stays in use. The channel and server options limit the frame size and set the timeout
after which a silent peer counts as disconnected.
"""

import hmac
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from cluster.config_sections import TrustConfig
from cluster.errors import ConfigError
from cluster.trust import PeerRole, is_loopback, roles_of
from protos.messages import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

CERTIFICATE = "tls.crt"
KEY = "tls.key"
AUTHORITY = "ca.crt"


@dataclass(frozen=True, slots=True)
class CertificateSet:
    """PEM data: own certificate, its private key, and one or more trusted authorities."""

    certificate: bytes
    key: bytes
    authority: bytes


class CertificateFiles:
    """Reads certificates from a folder; keeps the latest valid set."""

    def __init__(self, folder: Path) -> None:
        """Reads the first set. Raises ConfigError if files are missing or invalid, or do not match."""
        self._folder = folder
        self._current = self._read()
        self._latest_error: str | None = None  # error of the latest set; None if it is valid

    def current(self) -> CertificateSet:
        """Reloads the folder and returns the latest valid set; never raises ConfigError."""
        try:
            self._current = self._read()
            self._latest_error = None
        except ConfigError as error:
            if str(error) != self._latest_error:
                self._latest_error = str(error)
                log.error("new certificates are unusable, so the previous ones stay in use; fix the files: %s", error)
        return self._current

    def _read(self) -> CertificateSet:
        try:
            certificates = CertificateSet(
                *((self._folder / name).read_bytes() for name in (CERTIFICATE, KEY, AUTHORITY))
            )
        except OSError as error:
            missing = f"{error.filename}: {error.strerror}"
            files = f"{CERTIFICATE}, {KEY} and {AUTHORITY}"
            raise ConfigError(f"trust.certificates: cannot read {missing}; add {files}") from error
        self._check(certificates)
        return certificates

    def _check(self, certificates: CertificateSet) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(cadata=certificates.authority.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"trust.certificates: {self._folder / AUTHORITY} holds no certificates; expected PEM: {error}"
            ) from error
        try:
            # `load_cert_chain` takes only paths, so compare the files with the bytes read above.
            context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY, password="")
            is_same = (self._folder / CERTIFICATE).read_bytes() == certificates.certificate
            is_same = is_same and (self._folder / KEY).read_bytes() == certificates.key
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"trust.certificates: {CERTIFICATE} and {KEY} in {self._folder} do not match; replace both: {error}"
            ) from error
        if not is_same:
            raise ConfigError(f"trust.certificates: the files in {self._folder} are being replaced; try again")


KEEPALIVE_MS = 2_000  # a hung peer is detected within KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS
KEEPALIVE_TIMEOUT_MS = 3_000

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # the effective timeout; its default is one minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.use_local_subchannel_pool", 1),  # redialing a hung peer must not reuse a pooled connection
    ("grpc.so_reuseport", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    ("grpc.max_concurrent_streams", 64),  # per connection; peers use one
)


Metadata = tuple[tuple[str, str], ...]

AUTHORIZATION = "authorization"
EVERY_ROLE = frozenset(PeerRole)


def ignore() -> None:
    """Does nothing; default for callers that do not count handshakes."""


class Credentials(Protocol):
    """Credentials of one process in its role: for listening, dialing and checking callers."""

    @property
    def metadata(self) -> Metadata:
        """Metadata that this process sends with each stream it opens."""
        ...

    def listen(self, server: grpc.aio.Server, host: str, port: int, on_handshake: Callable[[], None] = ignore) -> int:
        """Binds a server; returns the port. Calls `on_handshake`, in any thread, when a TLS handshake begins."""
        ...

    def dial(self, address: str, peer: PeerRole) -> grpc.aio.Channel:
        """Returns a channel to a peer, which must prove its role."""
        ...

    def belongs(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Returns whether the metadata authenticates a caller."""
        ...

    def roles(self, auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[PeerRole]:
        """Returns the roles proved by a caller's connection."""
        ...


class NoCredentials:
    """Trusts every caller; without `insecure`, it listens only on loopback addresses."""

    metadata: Metadata = ()

    def __init__(self, insecure: bool = False) -> None:
        self._insecure = insecure

    def listen(self, server: grpc.aio.Server, host: str, port: int, on_handshake: Callable[[], None] = ignore) -> int:
        if not self._insecure and not is_loopback(host):
            raise ConfigError(
                f"trust: refusing to listen on {host} without authentication;"
                " set trust.certificates or trust.token_file, or trust.insecure: true on a trusted network"
            )
        return server.add_insecure_port(f"{host}:{port}")

    def dial(self, address: str, peer: PeerRole) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    def belongs(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        return True

    def roles(self, auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[PeerRole]:
        return EVERY_ROLE


class TokenFile:
    """Accepts every caller that presents a shared token, in any role; does not encrypt."""

    def __init__(self, path: Path) -> None:
        """Reads the tokens. Raises ConfigError if the file holds none."""
        self._path = path
        self._tokens = self._read()

    @property
    def metadata(self) -> Metadata:
        return ((AUTHORIZATION, f"Bearer {self._current()[0]}"),)

    def listen(self, server: grpc.aio.Server, host: str, port: int, on_handshake: Callable[[], None] = ignore) -> int:
        return server.add_insecure_port(f"{host}:{port}")

    def dial(self, address: str, peer: PeerRole) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    def belongs(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        header = next((value for key, value in metadata if key == AUTHORIZATION), "")
        presented = header.encode() if isinstance(header, str) else header
        # Compare with every token in constant time, so that the duration reveals nothing.
        matches = [hmac.compare_digest(presented, f"Bearer {token}".encode()) for token in self._current()]
        return any(matches)

    def roles(self, auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[PeerRole]:
        return EVERY_ROLE

    def _current(self) -> tuple[str, ...]:
        """Reloads the file; keeps the old tokens if it is unreadable."""
        try:
            self._tokens = self._read()
        except ConfigError as error:
            log.error("cannot reload the tokens, so the previous ones stay in use: %s", error)
        return self._tokens

    def _read(self) -> tuple[str, ...]:
        try:
            tokens = tuple(self._path.read_text("ascii").split())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"trust.token_file: cannot read {self._path}: {error}") from error
        if not tokens:
            raise ConfigError(f"trust.token_file: {self._path} is empty; write one token per line")
        return tokens


class MutualTls:
    """Mutual TLS: both sides present certificates that contain their roles and are signed by the same authority."""

    metadata: Metadata = ()

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files

    def listen(self, server: grpc.aio.Server, host: str, port: int, on_handshake: Callable[[], None] = ignore) -> int:
        served = self._files.current()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            """Called at each handshake; returns a changed configuration, or None to keep the current one."""
            nonlocal served
            on_handshake()
            certificates = self._files.current()
            if certificates == served:
                return None
            served = certificates
            return _server_configuration(certificates)

        offered = grpc.dynamic_ssl_server_credentials(
            _server_configuration(served),
            newer,  # type: ignore[arg-type]  # the stubs do not allow None
            require_client_authentication=True,
        )
        return server.add_secure_port(f"{host}:{port}", offered)

    def dial(self, address: str, peer: PeerRole) -> grpc.aio.Channel:
        """Dials with the role as the expected name, because certificates contain roles rather than addresses."""
        certificates = self._files.current()
        shown = grpc.ssl_channel_credentials(certificates.authority, certificates.key, certificates.certificate)
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer.name_in_certificate))
        return grpc.aio.secure_channel(address, shown, options=options)

    def belongs(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        return True  # the handshake has already checked the certificate

    def roles(self, auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[PeerRole]:
        names = auth_context.get("x509_subject_alternative_name", ())
        return roles_of(name.decode(errors="replace") for name in names)


def _server_configuration(certificates: CertificateSet) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.certificate)], certificates.authority
    )


def credentials_of(trust: TrustConfig, role: PeerRole) -> Credentials:
    """Creates the configured credentials. Raises ConfigError if files are missing or unusable."""
    if trust.certificates is not None:
        return MutualTls(CertificateFiles(Path(trust.certificates.replace("{role}", role.value))))
    if trust.token_file is not None:
        return TokenFile(Path(trust.token_file))
    return NoCredentials(trust.insecure)
