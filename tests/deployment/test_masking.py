"""Masks that vanish in a sum and only there; shares that open a seed, and one too few that do not."""

from importlib.util import find_spec
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import ValidationError
from scipy.stats import chi2

from fedvl.config import FederationConfig
from fedvl.deployment.masking import (
    PRIME,
    SEALED_BYTES,
    SECRET_BYTES,
    SHARE_BYTES,
    join_shares,
    lagrange,
    masked,
    pair_key,
    seal,
    shares_needed,
    split,
    stream,
    unmask,
    unseal,
    value_at,
)
from fedvl.errors import FedVLError


def public(private):
    return private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def test_a_pair_has_one_key_for_each_purpose_and_nobody_else_has_it():
    one, two, other = (X25519PrivateKey.generate() for _ in range(3))
    assert pair_key(one, public(two), b"a") == pair_key(two, public(one), b"a")
    assert (
        len({pair_key(one, public(two), b"a"), pair_key(one, public(two), b"b"), pair_key(other, public(two), b"a")})
        == 3
    )


def test_the_stream_is_chacha20_of_rfc_8439():
    """The first block for a key and nonce of zeros, from the RFC's appendix A.1."""
    block = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert stream(bytes(32), 4).numpy().tobytes() == block


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 7), st.integers(1, 40), st.data())
def test_masks_vanish_in_the_sum_of_those_who_answered_whoever_is_lost(clients, length, data):
    numbers = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(-(2**50), 2**50), min_size=length, max_size=length),
                min_size=clients,
                max_size=clients,
            )
        )
    )
    lost = sorted(data.draw(st.sets(st.integers(0, clients - 1), max_size=clients - 1)))
    privates = [X25519PrivateKey.generate() for _ in range(clients)]
    pairs = {
        own: {other: pair_key(privates[own], public(privates[other]), b"x") for other in range(clients) if other != own}
        for own in range(clients)
    }
    seeds = [bytes([client]) * SECRET_BYTES for client in range(clients)]
    sent = [masked(numbers[own], own, pairs[own], seeds[own]) for own in range(clients)]
    survivors = [client for client in range(clients) if client not in lost]
    total = torch.stack([sent[client] for client in survivors]).sum(0)
    told = {gone: {client: pairs[client][gone] for client in survivors} for gone in lost}
    assert torch.equal(unmask(total, [seeds[c] for c in survivors], told), numbers[survivors].sum(0))
    if len(survivors) > 1:  # one client's numbers do not come out, though all own masks are known
        alone = unmask(sent[survivors[0]], [seeds[survivors[0]]], {})
        assert not torch.equal(alone, numbers[survivors[0]])


def test_masked_numbers_are_uniform_bytes_though_the_numbers_are_zeros():
    pairs = {1: pair_key(X25519PrivateKey.generate(), public(X25519PrivateKey.generate()), b"x")}
    sent = masked(torch.zeros(40_000, dtype=torch.long), 0, pairs, bytes(SECRET_BYTES))
    counts = torch.bincount(
        torch.frombuffer(bytearray(sent.numpy().tobytes()), dtype=torch.uint8).long(), minlength=256
    )
    expected = counts.sum() / 256
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert chi2.cdf(statistic, 255) < 1 - 1e-6
    plain = torch.bincount(torch.zeros(40_000 * 8, dtype=torch.long), minlength=256)  # the test can fail
    assert chi2.cdf(float(((plain - expected) ** 2 / expected).sum()), 255) > 1 - 1e-6


def test_any_shares_that_are_enough_give_the_secret_and_one_too_few_do_not():
    secret, needed = bytes(range(32)), 3
    shares = split(secret, [0, 2, 3, 5, 9], needed)
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    for chosen in combinations(shares, needed):
        assert join_shares({holder: shares[holder] for holder in chosen}, needed) == secret
    assert join_shares(shares, needed) == secret
    with pytest.raises(FedVLError, match="2 shares do not restore a secret that needs 3"):
        join_shares({holder: shares[holder] for holder in (0, 2)}, needed)


def test_one_share_too_few_fits_every_secret():
    """For any other secret there is a third share that completes these two: they say nothing about it."""
    shares = split(bytes(range(32)), [0, 1, 2], 3)
    for other in (bytes(32), b"\xff" * 32):
        weights = lagrange((0, 1, 2))
        known = sum(weights[holder] * int.from_bytes(shares[holder]) for holder in (0, 1))
        third = (int.from_bytes(other) - known) * pow(weights[2], -1, PRIME) % PRIME
        assert join_shares({0: shares[0], 1: shares[1], 2: third.to_bytes(SHARE_BYTES)}, 3) == other


def test_a_false_share_gives_no_secret():
    shares = split(bytes(range(32)), [0, 1, 2], 3)
    assert join_shares({**shares, 1: bytes(SHARE_BYTES)}, 3) != bytes(range(32))


def test_a_polynomial_by_hand():
    assert value_at([5, 3, 2], 4) == 5 + 3 * 4 + 2 * 16
    # 5 + 3x + 2x^2 at 1, 2, 3 is 10, 19, 32; holders are counted from 0
    weights = lagrange((0, 1, 2))
    assert [weight if weight < 10 else weight - PRIME for weight in weights.values()] == [3, -3, 1]
    assert (3 * 10 - 3 * 19 + 32) == 5
    assert pow(3, PRIME - 1, PRIME) == 1  # Fermat, as for a prime


@pytest.mark.parametrize(
    ("clients", "share", "needed"),
    [
        *((2, 2 / 3, 2), (3, 2 / 3, 2), (4, 2 / 3, 3), (5, 2 / 3, 4), (6, 2 / 3, 4), (10, 2 / 3, 7), (100, 2 / 3, 67)),
        *((4, 0.500001, 3), (5, 0.500001, 3), (10, 0.500001, 6), (5, 1.0, 5)),
    ],
)
def test_the_threshold_is_a_share_of_the_clients_and_more_than_half(clients, share, needed):
    assert shares_needed(clients, share) == needed


def test_sealed_shares_open_for_their_holder_alone_and_unchanged():
    sealed = seal(b"s" * 2 * SHARE_BYTES, b"k" * 32)
    assert len(sealed) == SEALED_BYTES
    assert unseal(sealed, b"k" * 32) == b"s" * 2 * SHARE_BYTES
    assert unseal(sealed, b"j" * 32) is None
    assert unseal(sealed[:-1] + b"\0", b"k" * 32) is None


@pytest.mark.parametrize("share", [0.0, 0.34, 0.5, 1.01])
def test_no_experiment_has_a_threshold_of_half_the_clients_or_fewer(share):
    with pytest.raises(ValidationError, match="sum_threshold"):
        FederationConfig(sum_threshold=share)
