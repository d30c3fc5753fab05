"""Test certificates: an authority that writes folders in cert-manager's layout."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from actors.net.credentials import AUTHORITY, CERTIFICATE, KEY
from cluster.config_sections import TrustConfig
from cluster.trust import PeerRole


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@dataclass(frozen=True)
class Authority:
    """Certificate authority that both peers trust."""

    name: str = "slipstream"
    _key: ec.EllipticCurvePrivateKey = field(default_factory=_new_key, repr=False)

    @property
    def pem(self) -> bytes:
        made = self._builder(self.name, self._key.public_key(), timedelta(days=9)).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        return made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(self, folder: Path, *roles: PeerRole, lasts: timedelta = timedelta(days=1)) -> None:
        """Writes a certificate for the given roles, its key, and the authority; a negative `lasts` is expired."""
        key = _new_key()
        names = [x509.DNSName(role.name_in_certificate) for role in roles] or [x509.DNSName("somebody.else")]
        made = self._builder("peer", key.public_key(), lasts).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CERTIFICATE).write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        (folder / KEY).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (folder / AUTHORITY).write_bytes(self.pem)

    def issue_all(self, base: Path) -> TrustConfig:
        """Writes a folder for each role, in the layout of each pool's pods."""
        for role in PeerRole:
            self.issue(base / role.value, role)
        return TrustConfig(certificates=str(base / "{role}"))

    def _builder(self, subject: str, key: ec.EllipticCurvePublicKey, lasts: timedelta) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=9))
            .not_valid_after(now + lasts)
        )
