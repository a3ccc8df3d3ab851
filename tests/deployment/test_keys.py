"""Certificates that a client accepts for the right name only, and keys in the form that Flower reads."""

import importlib
import stat

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

import fedvl.deployment
from fedvl.deployment.keys import make_authority, make_key, make_server_certificate, public_key_of, write_private
from fedvl.errors import FedVLError


def test_the_server_is_certified_for_its_host_and_this_machine(tmp_path):
    make_authority(tmp_path)
    make_server_certificate(tmp_path, "fed.example.org")
    authority, server = (
        x509.load_pem_x509_certificate((tmp_path / name).read_bytes()) for name in ("ca.crt", "server.crt")
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_private_keys_are_readable_by_their_owner_only(tmp_path):
    make_authority(tmp_path)
    make_server_certificate(tmp_path, "127.0.0.1")
    write_private(tmp_path / "key", make_key())
    public = public_key_of(tmp_path / "key")
    for name in ("ca.key", "server.key", "key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    private = load_ssh_private_key((tmp_path / "key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.public_key() == load_ssh_public_key(public.encode())


def test_without_flower_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FedVLError, match=r'pip install "flwr==1.41.0"'):
        importlib.reload(fedvl.deployment)
