"""Trust between hosts: mutual TLS 1.3 whose certificates follow from the run secret.

Every process derives the same certificate authority from the secret (HKDF, RFC 5869) and lets it sign a certificate for a
key of its own. So exactly those that know the secret are let in; the secret itself never travels. Certificates do not
expire: the clocks of hosts differ, and a run has no use for a date.
"""

from __future__ import annotations

import functools
import hashlib
import os
import ssl
import stat
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from gemini_ft.config import GeminiConfig, without_passwords
from gemini_ft.errors import ConfigError, SecretError

_AUTHORITY = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gemini-ft run")])
_HOST = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gemini-ft host")])
_ALWAYS = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


def read_secret(config: GeminiConfig) -> bytes:
    """The run secret from the user: ``secret_file``, or GEMINI_SECRET; empty when there is none.

    Raises SecretError: the file is missing, empty, or readable by others.
    """
    if config.secret_file is None:
        return os.fsencode(os.environ.get("GEMINI_SECRET", ""))
    way = "give the path of a file, made with `umask 077; openssl rand -hex 32 > FILE`; GEMINI_SECRET takes the secret itself"
    if not (secret := private_file("secret_file", config.secret_file, way)):
        raise SecretError(f"secret_file={config.secret_file} is empty; it must hold the run secret, the same on all hosts")
    return secret


def private_file(option: str, path: Path, way: str) -> bytes:
    """The content of a file that nobody else may read, without the space around it; ``way``: the way out where there is no file.

    Raises SecretError: it is missing, or readable by others.
    """
    try:
        mode, content = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        shown = without_passwords(str(path)) if path.is_absolute() else "(no absolute path: not shown, since it may be the secret itself)"
        raise SecretError(f"{option}={shown}: {error.strerror}; {way}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecretError(f"{option}={path} has mode {stat.S_IMODE(mode):04o} and may be read by others; `chmod 600 {path}`")
    return content


def fingerprint(secret: bytes) -> str:
    """A mark of a secret that may be shown: enough to see that two differ, no help in guessing a random one."""
    return hashlib.sha256(b"gemini-ft fingerprint" + secret).hexdigest()[:16] if secret else ""


def derive(secret: bytes, purpose: bytes, length: int = 32) -> bytes:
    """A key for one purpose, from which neither the secret nor the key for another purpose can be found."""
    return HKDF(hashes.SHA256(), length, salt=None, info=b"gemini-ft " + purpose).derive(secret)


def switch_key(config: GeminiConfig) -> bytes:
    """The key that a switch and the ranks share, derived from the run secret that the user gave.

    Raises ConfigError: there is no secret. SecretError: its file is missing, empty, or readable by others.
    """
    if not (secret := read_secret(config)):
        raise ConfigError("a switch needs a secret that it shares with all ranks; give it and them the same GEMINI_SECRET_FILE")
    return derive(secret, b"switch")


@functools.lru_cache(maxsize=8)
def tls_context(secret: bytes, server: bool) -> ssl.SSLContext:
    """The TLS context of one side, which proves that both know ``secret``; it must not be empty."""
    if not secret:
        raise ValueError("an empty secret would let everybody in")
    root, chain = _identity(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # hosts are known by the authority; which one was meant is said and checked inside
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=root.decode())
    _load_chain(context, chain)
    if server:
        context.num_tickets = 0  # sessions are never resumed, and a reader that only waits would have to take tickets in
    return context


@functools.lru_cache(maxsize=4)
def _identity(secret: bytes) -> tuple[bytes, bytes]:
    """The certificate of a run's authority; and this process's own key and certificate, by which others tell it from a second one."""
    authority, key = Ed25519PrivateKey.from_private_bytes(derive(secret, b"authority")), Ed25519PrivateKey.generate()
    chain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + _certificate(_HOST, key, authority, is_authority=False)
    return _certificate(_AUTHORITY, authority, authority, is_authority=True), chain


def _certificate(subject: x509.Name, key: Ed25519PrivateKey, authority: Ed25519PrivateKey, is_authority: bool) -> bytes:
    builder = x509.CertificateBuilder(
        issuer_name=_AUTHORITY,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=1 if is_authority else x509.random_serial_number(),
        not_valid_before=_ALWAYS[0],
        not_valid_after=_ALWAYS[1],
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    return builder.sign(authority, None).public_bytes(Encoding.PEM)


def _load_chain(context: ssl.SSLContext, chain: bytes) -> None:
    """Loads a key into an SSL context, which takes files only; this one has no name and never reaches a disk."""
    fd = os.memfd_create("gemini-ft-certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, chain)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
