"""Makes the certificates of a farm: its own authority, and one certificate for each machine."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from honed.protocol.errors import AlreadyExists, InvalidArgument

from .scheduler import AUTHORITY, CERTIFICATE, KEY

AUTHORITY_FOLDER = "authority"  # Stays where it was made: its key lets anyone in
_DAYS = 825  # Validity of a machine's certificate
_AUTHORITY_DAYS = 3650


def issue(folder: Path, names: list[str]) -> list[Path]:
    """Make certificates of the authority in `folder`, and the authority if there is none.

    Returns a folder for each name, to be copied to that machine. Raises AlreadyExists for a name that has
    one, InvalidArgument for a name that is not a folder's.
    """
    for name in names:
        if not name or name.startswith(".") or "/" in name or name == AUTHORITY_FOLDER or len(name) > 64:
            raise InvalidArgument(f"{name[:80]!r} cannot be a machine's name; give letters and digits")
        if (folder / name).exists():
            raise AlreadyExists(f"{folder / name} is there already; remove it for another certificate")
    authority, key = _authority(folder / AUTHORITY_FOLDER)
    return [_machine(folder / name, name, authority, key) for name in names]


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if (folder / KEY).exists():
        loaded = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise InvalidArgument(f"{folder / KEY} is no key of a farm's authority; begin in another folder")
        return x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes()), loaded
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "honed farm authority")])
    made = (
        _builder(name, name, key, _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(parents=True, mode=0o700)
    _write(folder / KEY, _key_text(key))
    _write(folder / AUTHORITY, made.public_bytes(serialization.Encoding.PEM))
    return made, key


def _machine(
    folder: Path, name: str, authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey
) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    made = (
        _builder(subject, authority.subject, key, _DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    folder.mkdir(mode=0o700)
    _write(folder / KEY, _key_text(key))
    _write(folder / CERTIFICATE, made.public_bytes(serialization.Encoding.PEM))
    _write(folder / AUTHORITY, authority.public_bytes(serialization.Encoding.PEM))
    return folder


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # Boards without a clock lag a little
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes) -> None:
    """Write a new file that only its owner may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
