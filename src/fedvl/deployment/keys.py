"""Certificates and keys: an authority, the server's certificate, a key pair per party."""

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

CURVE = ec.SECP384R1
DAYS = 825  # a certificate's life; init again before it ends


def write_private(path: Path, content: bytes) -> None:
    """A file that only its owner can read, from its first byte on."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def make_certificates(folder: Path, host: str) -> None:
    """ca.crt and ca.key, and server.crt and server.key for this host and for the machine itself."""
    authority_key, server_key = ec.generate_private_key(CURVE()), ec.generate_private_key(CURVE())
    authority_name, server_name = named("FedVL federation authority"), named(host)
    authority = (
        certificate(authority_name, authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    hosts = dict.fromkeys([host, "localhost", "127.0.0.1"])
    server = (
        certificate(server_name, authority_name, server_key.public_key())
        .add_extension(x509.SubjectAlternativeName([general_name(item) for item in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    for name, key, made in (("ca", authority_key, authority), ("server", server_key, server)):
        (folder / f"{name}.crt").write_bytes(made.public_bytes(Encoding.PEM))
        write_private(folder / f"{name}.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def make_party_key(path: Path) -> str:
    """A key pair in OpenSSH form: the private key in a file, the public one as a line of text."""
    key = ec.generate_private_key(CURVE())
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def certificate(subject: x509.Name, issuer: x509.Name, public_key: Any) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=DAYS))
    )


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
