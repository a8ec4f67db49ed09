"""Reads and writes keys and signatures in minisign's format, so that `minisign` makes and checks them, too.

A public key is 2 bytes of algorithm, 8 of key id, and an Ed25519 key, in base64; a signature is that of the
BLAKE2b-512 of the data, and a second one over the first and a trusted comment
(https://jedisct1.github.io/minisign, "Signature format", "Public key format", "Secret key format"). Secret
keys have no password, as `minisign -G -W` makes them, because honed-hub signs unattended.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from honed.protocol.errors import InvalidArgument, NotFound, PermissionDenied

_SIGNED: Final = b"Ed"  # The algorithm of keys
_PREHASHED: Final = b"ED"  # Signatures of a hash; those of whole files ("Ed") are refused
_KEY_BYTES: Final = 2 + 8 + 32
_SECRET: Final = struct.Struct("<2s2s2s32sQQ8s64s32s")
_SIGNATURE_BYTES: Final = 2 + 8 + 64
_UNTRUSTED: Final = "untrusted comment: "
_TRUSTED: Final = "trusted comment: "
MAX_SIGNATURE_BYTES: Final = 4096  # Maximum size of a signature file


class BadSignature(InvalidArgument):
    """Raised when data is not signed, or not by the key that must sign it."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key: an Ed25519 key and its id."""

    id: bytes  # 8 bytes
    key: bytes  # 32 bytes

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a key as `minisign` prints it, "RW" and 54 more characters; raise InvalidArgument."""
        line = text.strip().splitlines()[-1].strip() if text.strip() else ""
        data = _decode(line, "a public key")
        if len(data) != _KEY_BYTES or data[:2] != _SIGNED:
            raise InvalidArgument(f"{line[:60]!r} is no key of minisign's; give the line that begins with RW")
        return cls(data[2:10], data[10:])

    def __str__(self) -> str:
        """Return the key as `minisign` prints it."""
        return base64.b64encode(_SIGNED + self.id + self.key).decode()

    @property
    def name(self) -> str:
        """The key id as `minisign` prints it: 16 hexadecimal digits, the last byte first."""
        return self.id[::-1].hex().upper()

    def check(self, data: bytes, signature: bytes) -> str:
        """Return the trusted comment of a signature file over `data`.

        Raises BadSignature if it is no valid signature of this key.
        """
        algorithm, key_id, signed, comment, whole = _read(signature)
        if algorithm != _PREHASHED:
            raise BadSignature("its signature is of an old kind; sign with minisign 0.8 or newer")
        if not hmac.compare_digest(key_id, self.id):
            raise BadSignature(f"it is signed by key {key_id[::-1].hex().upper()}, and not by {self.name}")
        verify = VerifyKey(self.key)
        try:
            verify.verify(_hash(data), signed)
        except BadSignatureError:
            raise BadSignature(f"its signature by {self.name} is wrong: it was changed or cut off") from None
        try:
            verify.verify(signed + comment.encode(), whole)
        except BadSignatureError:
            raise BadSignature(f"the comment of its signature by {self.name} was changed") from None
        return comment


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A secret key, which signs."""

    id: bytes
    seed: bytes  # 32 bytes

    @classmethod
    def make(cls) -> Self:
        """Return a new random key."""
        return cls(os.urandom(8), bytes(SigningKey.generate()))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the key in a file; raise NotFound, PermissionDenied, or InvalidArgument if it is none."""
        try:
            text = path.read_text()
        except FileNotFoundError:
            raise NotFound(f"there is no key {path}; make one with 'hone hub key'") from None
        except PermissionError:
            raise PermissionDenied(f"key {path} may not be read; check who owns it") from None
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"key {path} cannot be read ({error}); make another") from error
        lines = text.splitlines()
        data = _decode(lines[1].strip() if len(lines) > 1 else "", f"the key in {path}")
        if len(data) != _SECRET.size:
            raise InvalidArgument(f"{path} is no secret key of minisign's; make one with 'hone hub key'")
        signing, derived, _, _, _, _, key_id, secret, _ = _SECRET.unpack(data)
        if derived != b"\0\0":
            raise InvalidArgument(f"key {path} has a password; make one without: minisign -G -W")
        # Without a password minisign stores no checksum; the public half serves as one.
        if signing != _SIGNED or bytes(SigningKey(secret[:32]).verify_key) != secret[32:]:
            raise InvalidArgument(f"key {path} is damaged; make another with 'hone hub key'")
        return cls(key_id, secret[:32])

    def save(self, path: Path) -> None:
        """Write the key to a new file that only its owner may read; raise InvalidArgument if it exists."""
        key = SigningKey(self.seed)
        secret = self.seed + bytes(key.verify_key)
        data = _SECRET.pack(_SIGNED, b"\0\0", b"B2", bytes(32), 0, 0, self.id, secret, bytes(32))
        text = f"{_UNTRUSTED}honed secret key {self.public.name}\n{base64.b64encode(data).decode()}\n"
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise InvalidArgument(f"there is a key at {path} already; remove it to make another") from None
        except OSError as error:
            raise InvalidArgument(f"no key can be written to {path} ({error.strerror})") from error

    @property
    def public(self) -> PublicKey:
        """The public key, with which others check signatures."""
        return PublicKey(self.id, bytes(SigningKey(self.seed).verify_key))

    def sign(self, data: bytes, comment: str) -> bytes:
        """Return a signature file over `data` and a comment of one line."""
        key = SigningKey(self.seed)
        signed = key.sign(_hash(data)).signature
        whole = key.sign(signed + comment.encode()).signature
        first = base64.b64encode(_PREHASHED + self.id + signed).decode()
        second = base64.b64encode(whole).decode()
        untrusted = f"signature from honed key {self.public.name}"
        return f"{_UNTRUSTED}{untrusted}\n{first}\n{_TRUSTED}{comment}\n{second}\n".encode()


def _read(signature: bytes) -> tuple[bytes, bytes, bytes, str, bytes]:
    """Return algorithm, key id, signature, trusted comment and the signature over both."""
    if not signature.strip():
        raise BadSignature("it has no signature")
    if len(signature) > MAX_SIGNATURE_BYTES:
        raise BadSignature("its signature is far too long")
    try:
        lines = signature.decode().split("\n")
    except UnicodeDecodeError:
        raise BadSignature("its signature is no text") from None
    if len(lines) < 4 or not lines[0].startswith(_UNTRUSTED) or not lines[2].startswith(_TRUSTED):
        raise BadSignature("its signature is no file of minisign's")
    first, whole = _part(lines[1]), _part(lines[3])
    if len(first) != _SIGNATURE_BYTES or len(whole) != 64:
        raise BadSignature("its signature is cut off")
    return first[:2], first[2:10], first[10:], lines[2].removeprefix(_TRUSTED).rstrip("\r"), whole


def _part(line: str) -> bytes:
    try:
        return base64.b64decode(line.strip(), validate=True)
    except (binascii.Error, ValueError):
        raise BadSignature("its signature is damaged") from None


def _decode(line: str, what: str) -> bytes:
    try:
        return base64.b64decode(line, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"{what} is not base64; give it as minisign prints it") from None


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=64).digest()
