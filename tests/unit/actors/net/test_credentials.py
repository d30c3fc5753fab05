"""Credentials on disk are reloaded, kept while a new set is incomplete, and refused by name if missing."""

import logging

import pytest

from actors.net.credentials import (
    AUTHORITY,
    CERTIFICATE,
    EVERY_ROLE,
    KEY,
    CertificateFiles,
    MutualTls,
    NoCredentials,
    TokenFile,
    credentials_of,
)
from cluster.config_sections import TrustConfig
from cluster.errors import ConfigError
from cluster.trust import PeerRole, is_loopback
from tests.certificates import Authority


def test_certificates_that_were_replaced_are_those_that_are_read(tmp_path):
    authority = Authority()
    authority.issue(tmp_path, PeerRole.ROUTER)
    files = CertificateFiles(tmp_path)
    before = files.current()
    assert files.current() == before
    authority.issue(tmp_path, PeerRole.ROUTER)
    assert files.current().certificate == (tmp_path / CERTIFICATE).read_bytes() != before.certificate


@pytest.mark.parametrize("name", [CERTIFICATE, KEY, AUTHORITY])
@pytest.mark.parametrize("harm", ["gone", "empty", "of another"])
def test_the_old_certificates_serve_until_a_new_set_is_complete(tmp_path, name, harm, caplog):
    Authority().issue(tmp_path / "used", PeerRole.ROUTER)
    Authority().issue(tmp_path / "another", PeerRole.ROUTER)
    files = CertificateFiles(tmp_path / "used")
    before = files.current()
    part = tmp_path / "used" / name
    if harm == "gone":
        part.unlink()
    else:
        part.write_bytes(b"" if harm == "empty" else (tmp_path / "another" / name).read_bytes())
    if (name, harm) == (AUTHORITY, "of another"):
        assert files.current().authority != before.authority, "authorities change by themselves, as bundles do"
        return
    with caplog.at_level(logging.ERROR):
        assert [files.current() for _ in range(3)] == [before] * 3
    assert len(caplog.records) == 1


def test_a_folder_without_certificates_is_refused_by_the_key_and_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"trust\.certificates: cannot read .*/router/tls\.crt"):
        credentials_of(TrustConfig(certificates=str(tmp_path / "{role}")), PeerRole.ROUTER)


def test_roles_are_the_names_in_a_certificate(tmp_path):
    Authority().issue(tmp_path, PeerRole.ROUTER)
    tls = MutualTls(CertificateFiles(tmp_path))
    names = {"x509_subject_alternative_name": [b"router.slipstream", b"10.0.0.1", b"target.slipstream.evil"]}
    assert tls.roles(names) == {PeerRole.ROUTER}
    assert tls.roles({}) == set()


def test_unmutated_messages_are_sent_and_accepted(tmp_path):
    path = tmp_path / "token"
    path.write_text("new\nold\n")
    token = TokenFile(path)
    assert token.metadata == (("authorization", "Bearer new"),)
    assert token.belongs([("user-agent", "x"), ("authorization", "Bearer old")])
    for wrong in ([], [("authorization", "new")], [("authorization", "Bearer ")], [("authorization", b"\xff")]):
        assert not token.belongs(wrong)
    path.write_text("newer")
    assert token.metadata == (("authorization", "Bearer newer"),)
    assert not token.belongs([("authorization", "Bearer old")])
    path.write_text("")
    assert token.belongs([("authorization", "Bearer newer")]), "an empty file is no change"


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_token_file_without_a_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="token_file"):
        TokenFile(path)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "127.0.0.1.example")),
    ],
)
def test_loopback(host, expected):
    assert is_loopback(host) is expected


class Bound:
    """Fake listening server."""

    def add_insecure_port(self, address: str) -> int:
        return 1


@pytest.mark.parametrize(("host", "insecure"), [("127.0.0.1", False), ("10.0.0.1", True)])
def test_without_credentials_a_server_listens_on_loopback_or_where_all_are_trusted(host, insecure):
    credentials = credentials_of(TrustConfig(insecure=insecure), PeerRole.TARGET)
    assert credentials.listen(Bound(), host, 0) == 1  # type: ignore[arg-type]
    assert credentials.belongs([])
    assert credentials.roles({}) == EVERY_ROLE


def test_without_credentials_other_addresses_are_refused():
    with pytest.raises(ConfigError, match=r"listen on 10\.0\.0\.1.*trust\.certificates.*trust\.insecure: true"):
        NoCredentials().listen(Bound(), "10.0.0.1", 0)  # type: ignore[arg-type]
