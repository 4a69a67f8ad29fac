"""A self-signed certificate per process, and TLS 1.3 contexts in which both sides trust pinned certificates only."""

import os
import secrets
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

# The signed record that carries the certificate expires; the certificate itself must survive peers' wrong clocks.
_VALID_FROM, _VALID_UNTIL = datetime(2000, 1, 1), datetime(9999, 12, 31)


@dataclass(frozen=True)
class Certificate:
    """Hold this process's self-signed certificate and its private key."""

    der: bytes
    pem: bytes  # with the private key: never leaves the process but for the instant in which OpenSSL reads it

    def __repr__(self) -> str:
        return f"Certificate({len(self.der)} bytes)"


def create_certificate(identity: str) -> Certificate:
    """Create a key and a self-signed certificate that names the identity as its owner. It practically never expires."""
    key = ec.generate_private_key(ec.SECP256R1())
    # OpenSSL looks trusted certificates up by name: a random part keeps even those of one peer apart
    random, owner = (NameOID.COMMON_NAME, secrets.token_hex(16)), (NameOID.ORGANIZATIONAL_UNIT_NAME, identity)
    name = x509.Name([x509.NameAttribute(*part) for part in (random, owner)])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(_VALID_FROM).not_valid_after(_VALID_UNTIL)
    certificate = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = private + certificate.public_bytes(serialization.Encoding.PEM)
    return Certificate(certificate.public_bytes(serialization.Encoding.DER), pem)


def certificate_problem(der: bytes) -> str | None:
    """Return why OpenSSL would not take it as a peer's certificate; None where it would."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=der)
    except (ssl.SSLError, ValueError) as error:  # ValueError: there is none
        return str(error)
    return None


def owner_named_in(der: bytes) -> str | None:
    """Return the owner that a certificate names, or None if it names none.

    A peer that copies another's certificate cannot change that.
    """
    try:
        subject = x509.load_der_x509_certificate(der).subject
    except ValueError:
        return None
    names = [str(name.value) for name in subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)]
    return names[0] if names else None


def server_context(own: Certificate, trusted_der: Iterable[bytes]) -> ssl.SSLContext:
    """Create a TLS 1.3 context for accepting, which trusts these certificates only and lets no session be resumed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # tickets would be resumptions past the certificate check
    return _pinned(context, own, trusted_der)


def client_context(own: Certificate, server_der: bytes) -> ssl.SSLContext:
    """Create a TLS 1.3 context for connecting to the peer with this certificate; no host name is checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate is pinned, its name means nothing
    return _pinned(context, own, [server_der])


def rendezvous_context(own: Certificate) -> ssl.SSLContext:
    """Create a TLS 1.3 context for accepting anybody: who it is must be found out inside."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load_key(context, own)
    return context


def visitor_context() -> ssl.SSLContext:
    """Create a TLS 1.3 context for connecting to anybody: who it is must be found out inside."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _pinned(context: ssl.SSLContext, own: Certificate, trusted_der: Iterable[bytes]) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    for der in trusted_der:
        context.load_verify_locations(cadata=der)
    _load_key(context, own)
    return context


def _load_key(context: ssl.SSLContext, own: Certificate) -> None:
    """Load the certificate and its key into the context.

    OpenSSL takes a key from a file only (Python's ssl offers no other way): one in memory, or one of mode 0600 that is
    gone at once.
    """
    if hasattr(os, "memfd_create"):  # Linux: no disk, which may be full
        with os.fdopen(os.memfd_create("diloco"), "wb", buffering=0) as file:
            file.write(own.pem)
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return
    handle, path = tempfile.mkstemp(prefix="diloco-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(own.pem)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)
