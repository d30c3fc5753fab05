"""Certificate files that may be replaced while in use, in cert-manager's layout.

Kubernetes swaps all files of a secret at once, but a reader may run between two of them. A certificate whose key does
not match is not used, and the previous set stays in use until the files match again.
"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError

log = logging.getLogger(__name__)

CERTIFICATE = "tls.crt"
KEY = "tls.key"
AUTHORITY = "ca.crt"


@dataclass(frozen=True, slots=True)
class CertificateSet:
    """PEM data: our certificate, its private key, and the authorities we trust; `authority` may hold several."""

    certificate: bytes
    key: bytes
    authority: bytes


class CertificateFiles:
    """The latest complete set of certificates in a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError, naming what is missing or does not match."""
        self._folder = folder
        self._current = self._read()
        self._unfit: str | None = None  # why the latest set was rejected

    def current(self) -> CertificateSet:
        """Reads the folder and returns the latest complete set; never raises."""
        try:
            self._current = self._read()
            self._unfit = None
        except ConfigError as error:
            if str(error) != self._unfit:
                self._unfit = str(error)
                log.error("certificates were replaced by some that cannot be used, so the old ones stay: %s", error)
        return self._current

    def _read(self) -> CertificateSet:
        try:
            found = CertificateSet(*((self._folder / name).read_bytes() for name in (CERTIFICATE, KEY, AUTHORITY)))
        except OSError as error:
            missing = f"{error.filename}: {error.strerror}"
            files = f"{CERTIFICATE}, {KEY} and {AUTHORITY}"
            raise ConfigError(f"trust.certificates: cannot read {missing}; expected {files} there") from error
        self._check(found)
        return found

    def _check(self, found: CertificateSet) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(cadata=found.authority.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"trust.certificates: {self._folder / AUTHORITY} holds no certificates: {error}"
            ) from error
        try:
            # `load_cert_chain` takes only paths, so the files are compared afterwards with the bytes read above.
            context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY, password="")
            is_same = (self._folder / CERTIFICATE).read_bytes() == found.certificate
            is_same = is_same and (self._folder / KEY).read_bytes() == found.key
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"trust.certificates: {CERTIFICATE} and {KEY} in {self._folder} do not fit each other: {error}"
            ) from error
        if not is_same:
            raise ConfigError(f"trust.certificates: the files in {self._folder} are being replaced; try again")
