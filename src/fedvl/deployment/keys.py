"""Certificates and keys: an authority, the server's certificate, each party's key pair."""

import base64
import hashlib
import ipaddress
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from fedvl.errors import FedVLError
from fedvl.files import write_whole

CURVE = ec.SECP384R1
SIGNATURE = ec.ECDSA(hashes.SHA384())
AUTHORITY_DAYS, SERVER_DAYS = 3650, 825  # lives of certificates; fedvl federation renew makes the server's anew


def write_private(path: Path, content: bytes) -> None:
    """Make a file that only its owner can read, whatever the umask; raise if the name is taken."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)


def read_private(path: Path) -> bytes:
    """Read a regular file that only its owner can read; refuse a link."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise FedVLError(f"{path} is not a regular file; restore it from a copy.")
            if stat.S_IMODE(mode) & 0o077:
                raise FedVLError(f"Others can read {path}; make another with fedvl federation join --renew.")
            return file.read()
    except OSError as error:
        raise FedVLError(f"{path} cannot be read ({error.strerror}); restore it from a copy.") from error


# --- the authority and the server


def make_authority(folder: Path) -> None:
    """Make ca.crt, which all parties trust, and ca.key, which signs."""
    key, name = ec.generate_private_key(CURVE()), common_name("FedVL federation authority")
    made = (
        certificate(name, name, key.public_key(), AUTHORITY_DAYS, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA384())
    )
    write_private(folder / "ca.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    write_whole(folder / "ca.crt", made.public_bytes(Encoding.PEM))


def make_server_certificate(folder: Path, host: str) -> None:
    """Make server.crt and server.key for this host and for the machine itself."""
    key, authority = ec.generate_private_key(CURVE()), read_certificate(folder / "ca.crt")
    hosts = dict.fromkeys([host, "localhost", "127.0.0.1"])
    made = (
        certificate(common_name(host), authority.subject, key.public_key(), SERVER_DAYS, authority.public_key())
        .add_extension(x509.SubjectAlternativeName([general_name(item) for item in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(authority_key(folder), hashes.SHA384())
    )
    (folder / "server.key").unlink(missing_ok=True)
    write_private(folder / "server.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    write_whole(folder / "server.crt", made.public_bytes(Encoding.PEM))


def certify_party(folder: Path, name: str, public_key: str) -> str:
    """Return the authority's certificate that this key is this party's, as PEM."""
    key, authority = load_ssh_public_key(public_key.encode()), read_certificate(folder / "ca.crt")
    made = (
        certificate(common_name(name), authority.subject, key, AUTHORITY_DAYS, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(authority_key(folder), hashes.SHA384())
    )
    return made.public_bytes(Encoding.PEM).decode()


def certified_key(folder: Path, name: str, certificate_pem: str) -> str | None:
    """Return the public key that the authority certifies to be this client's now, or None."""
    authority, now = read_certificate(folder / "ca.crt"), datetime.now(UTC)
    try:
        found = x509.load_pem_x509_certificate(certificate_pem.encode())
        found.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return None
    if found.subject != common_name(name):
        return None
    if not all(each.not_valid_before_utc <= now <= each.not_valid_after_utc for each in (found, authority)):
        return None
    return found.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def authority_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError) as error:
        raise FedVLError(f"{folder / 'ca.key'} is needed to sign; put it back for the moment.") from error
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def certificate(
    subject: x509.Name, issuer: x509.Name, public_key: Any, days: int, issuer_key: Any
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FedVLError(f"{path} is not there or no certificate; restore the folder.") from error


def days_left(path: Path) -> int:
    """Return for how many days a certificate is still valid; below 0 once it is over."""
    return (read_certificate(path).not_valid_after_utc - datetime.now(UTC)).days


def check_certificate(path: Path) -> None:
    """Refuse a certificate that has expired, or that is not valid yet by this machine's clock."""
    found, now = read_certificate(path), datetime.now(UTC)
    if now < found.not_valid_before_utc:
        raise FedVLError(
            f"The clock of this machine says {now:%Y-%m-%d %H:%M} UTC, and {path} is valid from "
            f"{found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC: set the clock."
        )
    if now > found.not_valid_after_utc:
        raise FedVLError(
            f"{path} expired on {found.not_valid_after_utc:%Y-%m-%d}; the server's operator makes a new one."
        )


# --- the parties


def make_key() -> bytes:
    """Return a new private key in OpenSSH form."""
    return ec.generate_private_key(CURVE()).private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def sign(path: Path, content: bytes) -> str:
    """Sign with a client's private key."""
    return base64.b64encode(load_key(path).sign(content, SIGNATURE)).decode()


def public_key_of(path: Path) -> str:
    """Return the public counterpart of a client's private key, as one line of OpenSSH."""
    return load_key(path).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(read_private(path), None)
    except (ValueError, TypeError) as error:
        raise FedVLError(f"{path} is not a private key; make another with fedvl federation join --renew.") from error
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def signed_by(public_key: str, content: bytes, signature: str) -> bool:
    """Tell whether the owner of a party's key signed this; never raise on what a stranger wrote."""
    try:
        key = load_ssh_public_key(public_key.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != CURVE.name:
            return False
        key.verify(base64.b64decode(signature, validate=True), content, SIGNATURE)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def fingerprint(public_key: str) -> str:
    """Return a key's fingerprint as ssh-keygen -l shows it."""
    blob = base64.b64decode(public_key.split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def authority_fingerprint(folder: Path) -> str:
    """Return the SHA-256 of the authority's certificate, as browsers and openssl show it."""
    return read_certificate(folder / "ca.crt").fingerprint(hashes.SHA256()).hex(":").upper()


def common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
