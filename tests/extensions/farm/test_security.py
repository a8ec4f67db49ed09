"""Who may be in a farm: addresses, certificates, and what is not encrypted."""

from __future__ import annotations

import socket
import ssl
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from honed.farm import scheduler
from honed.farm.certificates import issue
from honed.farm.scheduler import check_address, security
from honed.protocol.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("tls://pc", "tls://pc:8786"),
        ("tls://10.0.0.7:99", "tls://10.0.0.7:99"),
        ("tcp://127.0.0.1", "tcp://127.0.0.1:8786"),
        ("tcp://localhost:5/", "tcp://localhost:5"),
        ("tcp://[::1]:7", "tcp://[::1]:7"),
    ],
)
def test_addresses_have_a_port(url: str, whole: str) -> None:
    assert check_address(url) == check_address(whole) == whole


@pytest.mark.parametrize("host", ["pc", "10.0.0.7", "0.0.0.0", "[::]", "127.0.0.1.example", "localhost.lan"])
def test_without_tls_only_this_machine_is_reached(host: str) -> None:
    with pytest.raises(InvalidArgument, match="is not encrypted"):
        check_address(f"tcp://{host}:8786")


@pytest.mark.parametrize(
    "url", ["", "pc:8786", "http://pc", "tls://", "tls://u@pc", "tls://pc/x", "tls://pc:x"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="no address"):
        check_address(url)


@given(st.text())
def test_any_text_is_an_address_or_refused(url: str) -> None:
    with suppress(InvalidArgument):
        assert check_address(check_address(url)) == check_address(url)


def test_tls_wants_certificates(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="wants certificates"):
        security("tls://pc:8786", None)
    with pytest.raises(NotFound, match=r"there is no .*ca\.pem"):
        security("tls://pc:8786", tmp_path)


@pytest.mark.parametrize("role", ["client", "scheduler", "worker"])
def test_both_sides_of_every_connection_are_asked_for_a_certificate(certificates: Path, role: str) -> None:
    guard = security("tls://pc:8786", certificates / "pc")
    for arguments in (guard.get_listen_args(role), guard.get_connection_args(role)):
        assert arguments["require_encryption"]
        assert arguments["ssl_context"].verify_mode is ssl.CERT_REQUIRED
        assert arguments["ssl_context"].minimum_version >= ssl.TLSVersion.TLSv1_2


def test_keys_are_for_their_owner_and_machines_sign_nobody(tmp_path: Path) -> None:
    (board,) = issue(tmp_path / "farm", ["board"])
    for key in (board / "key.pem", tmp_path / "farm" / "authority" / "key.pem"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    certificate = x509.load_pem_x509_certificate((board / "cert.pem").read_bytes())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    authority = x509.load_pem_x509_certificate((board / "ca.pem").read_bytes())
    key = authority.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    key.verify(certificate.signature, certificate.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256()))


def test_further_machines_have_the_same_authority(tmp_path: Path) -> None:
    (first,) = issue(tmp_path, ["one"])
    (second,) = issue(tmp_path, ["two"])
    assert (first / "ca.pem").read_bytes() == (second / "ca.pem").read_bytes()
    with pytest.raises(AlreadyExists, match="is there already"):
        issue(tmp_path, ["three", "one"])
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "authority", ".hidden", "x" * 65])
def test_odd_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be a machine's name"):
        issue(tmp_path, [name])


def test_a_scheduler_that_cannot_listen_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            Unavailable, match=rf"cannot listen at tcp://127.0.0.1:{port} \(Address already in use"
        ):
            scheduler.run(f"tcp://127.0.0.1:{port}", None, lambda _: None)
