"""Masks that vanish in a sum, and shares that open them: the arithmetic of secure sums.

Each pair of clients has a key that nobody else can compute (X25519, HKDF). One adds the stream that
it gives (ChaCha20) to its numbers and the other subtracts it, so that the sum over all is unmasked.
Each client also adds the stream of a seed of its own, of which it gives everyone a share (Shamir):
enough shares open it, and one too few say nothing. The protocol is that of Bonawitz et al. (CCS
2017), but for pair keys of one round, which survivors tell one by one for a client that was lost.
"""

import secrets
from collections.abc import Mapping, Sequence

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

SEED_BYTES = 32
PRIME = 2**521 - 1  # a seed is far below it
SHARE_BYTES = 66
SEALED_BYTES = SHARE_BYTES + 16


def threshold(clients: int) -> int:
    """Return how many shares open a client's own mask: more than half of them."""
    return clients // 2 + 1


# --- keys of pairs


def pair_key(own: X25519PrivateKey, other: bytes, purpose: str) -> bytes:
    """Return the key of two clients for one purpose; both get the same."""
    agreed = own.exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(hashes.SHA256(), SEED_BYTES, None, purpose.encode()).derive(agreed)


def stream(key: bytes, length: int) -> torch.Tensor:
    """Return 64-bit numbers that look random to who has not the key."""
    encryptor = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
    return torch.from_numpy(numpy.frombuffer(encryptor.update(bytes(8 * length)), "<i8").copy())


def masked(numbers: torch.Tensor, own: int, pair_keys: Mapping[int, bytes], seed: bytes) -> torch.Tensor:
    """Add the streams of all pairs and of the client's own seed; whole numbers wrap around."""
    result = numbers + stream(seed, len(numbers))
    for other, key in pair_keys.items():
        result += pair_sign(own, other) * stream(key, len(numbers))
    return result


def pair_sign(own: int, other: int) -> int:
    return 1 if own < other else -1


def unmask(total: torch.Tensor, seeds: Sequence[bytes], lost: Mapping[int, Mapping[int, bytes]]) -> torch.Tensor:
    """Subtract the survivors' own masks, and those that they share with lost clients."""
    result = total.clone()
    for seed in seeds:
        result -= stream(seed, len(total))
    for other, keys in lost.items():
        for survivor, key in keys.items():
            result -= pair_sign(survivor, other) * stream(key, len(total))
    return result


# --- shares of a seed


def split(seed: bytes, holders: Sequence[int], needed: int) -> dict[int, bytes]:
    """Return a share of a seed for each holder; ``needed`` of them give it back."""
    polynomial = [int.from_bytes(seed), *(secrets.randbelow(PRIME) for _ in range(needed - 1))]
    return {holder: evaluate(polynomial, holder + 1).to_bytes(SHARE_BYTES) for holder in holders}


def evaluate(polynomial: Sequence[int], at: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * at + coefficient) % PRIME
    return value


def join_shares(shares: Mapping[int, bytes], needed: int) -> bytes:
    """Return the seed of which these are shares; those beyond what is needed must fit the rest."""
    if len(shares) < needed:
        raise FedVLError(f"{len(shares)} shares do not open a mask that needs {needed}.")
    points = {holder + 1: int.from_bytes(share) for holder, share in sorted(shares.items())}
    enough = dict(list(points.items())[:needed])
    value = interpolate(enough, 0)
    if value >= 2 ** (8 * SEED_BYTES) or any(interpolate(enough, at) != share for at, share in points.items()):
        raise FedVLError("The shares of a mask do not fit together.")
    return value.to_bytes(SEED_BYTES)


def interpolate(points: Mapping[int, int], at: int) -> int:
    """Return the value of the polynomial through these points (Lagrange)."""
    value = 0
    for place, share in points.items():
        factor = share
        for other in points:
            if other != place:
                factor = factor * (at - other) * pow(place - other, -1, PRIME) % PRIME
        value = (value + factor) % PRIME
    return value


def seal(share: bytes, key: bytes) -> bytes:
    """Encrypt a share for its holder; a key is used once."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), share, None)


def unseal(sealed: bytes, key: bytes) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None)
    except InvalidTag as error:
        raise FedVLError("A share of a mask was changed on its way.") from error
