"""Arithmetic of secure aggregation: pairwise masks, self masks and secret shares.

Each pair of clients derives a key that nobody else can compute (X25519, HKDF). One client adds the
key's stream (ChaCha20) to its numbers, the other subtracts it, so the masks cancel in the sum. Each
client also adds the stream of its own seed. Seeds and the keys of pairwise masks are split into
shares (Shamir): a threshold of shares restores a secret, fewer say nothing about it.
"""

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedvl.errors import FedVLError

SECRET_BYTES = 32  # of a seed and of an X25519 private key
PRIME = 2**521 - 1  # larger than any secret
SHARE_BYTES = 66
SEALED_BYTES = 2 * SHARE_BYTES + 16  # the shares of a seed and of a key, encrypted together


def shares_needed(clients: int, share: float) -> int:
    """Return how many clients must sign a survivor list and help to open a sum: more than half."""
    return max(clients // 2 + 1, math.ceil(share * clients - 1e-9))


# --- masks


def pair_key(own: X25519PrivateKey, other: bytes, purpose: bytes) -> bytes:
    """Return the key that two clients share for one purpose."""
    agreed = own.exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(hashes.SHA256(), SECRET_BYTES, None, purpose).derive(agreed)


def stream(key: bytes, length: int) -> torch.Tensor:
    """Return pseudorandom 64-bit integers."""
    encryptor = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
    return torch.from_numpy(numpy.frombuffer(encryptor.update(bytes(8 * length)), "<i8").copy())


def masked(numbers: torch.Tensor, own: int, pair_keys: Mapping[int, bytes], seed: bytes) -> torch.Tensor:
    """Add the pairwise masks and the client's self mask modulo 2^64."""
    result = numbers + stream(seed, len(numbers))
    for other, key in pair_keys.items():
        result += pair_sign(own, other) * stream(key, len(numbers))
    return result


def pair_sign(own: int, other: int) -> int:
    return 1 if own < other else -1


def unmask(total: torch.Tensor, seeds: Sequence[bytes], lost: Mapping[int, Mapping[int, bytes]]) -> torch.Tensor:
    """Subtract the survivors' self masks and the masks that they share with lost clients."""
    result = total.clone()
    for seed in seeds:
        result -= stream(seed, len(total))
    for other, keys in lost.items():
        for survivor, key in keys.items():
            result -= pair_sign(survivor, other) * stream(key, len(total))
    return result


# --- shares of a secret


def split(secret: bytes, holders: Sequence[int], needed: int) -> dict[int, bytes]:
    """Return a share of a secret for each holder; ``needed`` of them restore it."""
    polynomial = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(needed - 1))]
    return {holder: value_at(polynomial, holder + 1).to_bytes(SHARE_BYTES) for holder in holders}


def value_at(polynomial: Sequence[int], at: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * at + coefficient) % PRIME
    return value


def join_shares(shares: Mapping[int, bytes], needed: int) -> bytes | None:
    """Return the secret that these shares restore; None if they are not shares of one secret."""
    if len(shares) < needed:
        raise FedVLError(f"{len(shares)} shares do not restore a secret that needs {needed}.")
    holders = tuple(sorted(shares)[:needed])
    weights = lagrange(holders)
    value = sum(weights[holder] * int.from_bytes(shares[holder]) for holder in holders) % PRIME
    return value.to_bytes(SECRET_BYTES) if value < 2 ** (8 * SECRET_BYTES) else None


@lru_cache(maxsize=256)
def lagrange(holders: tuple[int, ...]) -> dict[int, int]:
    """Return the weight of each holder's share in the value of the polynomial at 0."""
    weights = {}
    for holder in holders:
        above = below = 1
        for other in holders:
            if other != holder:
                above, below = above * (other + 1) % PRIME, below * (other - holder) % PRIME
        weights[holder] = above * pow(below, -1, PRIME) % PRIME
    return weights


def commitment(content: bytes) -> bytes:
    """Return the SHA-256 by which a share or a seed is recognised later."""
    return hashlib.sha256(content).digest()


def seal(shares: bytes, key: bytes) -> bytes:
    """Encrypt shares for their holder; a key is used once."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), shares, None)


def unseal(sealed: bytes, key: bytes) -> bytes | None:
    """Return the shares; None if they were not sealed with this key."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None)
    except InvalidTag:
        return None
