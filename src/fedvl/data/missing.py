"""Missing modalities: draw which samples miss their text or image, and fill in placeholders.

A specification such as ``both:0.7`` gives the modality and the share of samples that miss it:
``text``, ``image``, or ``both``, where half of that share misses the text and half the image.
A sample never misses both.

A missing text is the empty text. A missing image stays in memory and is marked in ``present``; a
method replaces it with ones after normalisation (``methods/parts/fused.py``), as missing-aware
prompting does.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from fedvl.errors import FedVLError
from fedvl.models.vilt import FusedEncoder
from fedvl.seeding import numpy_generator
from fedvl.tensors import IntArray, Tensors

Present = NDArray[np.bool_]  # samples x 2: has text, has image
TEXT, IMAGE = 0, 1
PATTERNS = ("text", "image", "both")
DEFAULT_RATE = 0.7  # of the paper's test conditions, if nothing is missing in training


class Missing(NamedTuple):
    pattern: str
    rate: float


def parse_missing(spec: str) -> Missing:
    pattern, _, text = spec.partition(":")
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if pattern not in PATTERNS or not 0 <= rate <= 1:
        raise FedVLError(
            f"Missing modalities are given as text:RATE, image:RATE or both:RATE, for example both:0.7, not '{spec}'."
        )
    return Missing(pattern, rate)


def draw_present(
    texts: NDArray[np.bool_],
    spec: str | None,
    seed: int,
    purpose: str,
    groups: list[NDArray[np.int64]] | None = None,
    whole: bool = False,
) -> Present:
    """Draw which modalities each sample has.

    ``texts`` says which samples have a text at all; those without one keep their image. The share
    is of all samples together or, with ``groups``, of each group (a client's samples); if these are
    ``whole``, of the groups: all samples of a group miss the same.
    """
    present = np.stack([texts, np.ones_like(texts)], axis=1)
    if spec is None:
        return present
    missing = parse_missing(spec)
    generator = numpy_generator(seed, "missing", purpose, spec)
    pools = [np.arange(len(texts))] if groups is None else [np.arange(len(groups))] if whole else groups
    for pool in pools:
        chosen = generator.permutation(pool)[: round(missing.rate * len(pool))]
        half = {"text": len(chosen), "image": 0, "both": (len(chosen) + 1) // 2}[missing.pattern]
        without_text, without_image = chosen[:half], chosen[half:]
        if whole and groups is not None:
            without_text, without_image = rows_of_groups(groups, without_text), rows_of_groups(groups, without_image)
        present[without_text, TEXT] = False
        present[without_image, IMAGE] = ~present[without_image, TEXT]
    return present


def rows_of_groups(groups: list[NDArray[np.int64]], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *(groups[group] for group in chosen)])


def conditions_of(spec: str | None) -> dict[str, str | None]:
    """Return the seven test conditions of the paper's results table, by name."""
    rate = parse_missing(spec).rate if spec else DEFAULT_RATE
    return {
        "as trained": spec,
        "miss-text": f"text:{rate:g}",
        "miss-image": f"image:{rate:g}",
        "miss-both": f"both:{rate:g}",
        "full": None,
        "text-only": "image:1",
        "image-only": "text:1",
    }


def lacking(inputs: Tensors, present: Present, no_text: torch.Tensor) -> Tensors:
    """Return the inputs with ``present``, and with empty-text tokens where the text is missing."""
    tokens = inputs["tokens"]
    known = torch.from_numpy(present).to(tokens.device)
    return {**inputs, "tokens": torch.where(known[:, TEXT, None], tokens, no_text.to(tokens.device)), "present": known}


def without_modalities(
    inputs: Tensors,
    spec: str | None,
    purpose: str,
    encoder: FusedEncoder,
    seed: int,
    groups: list[NDArray[np.int64]] | None = None,
    whole: bool = False,
) -> Tensors:
    """Leave out texts and images of samples as a specification such as both:0.7 says."""
    tokens, nothing = inputs["tokens"], encoder.tokenise([""])
    has_text = encoder.text_mask(tokens).sum(1).cpu().numpy() > nothing.shape[1]
    present = draw_present(has_text, spec, seed, purpose, groups, whole)
    padded = pad(nothing, (0, tokens.shape[1] - nothing.shape[1]), value=int(nothing[0, -1]))
    return lacking(inputs, present, padded)


class LabelNoise(NamedTuple):
    kind: str  # symmetric: any other class; pair: the next class
    share: float

    @classmethod
    def parse(cls, text: str) -> "LabelNoise":
        kind, _, share = text.partition(":")
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if kind not in ("symmetric", "pair") or not 0 <= value <= 1:
            raise FedVLError(
                f"Label noise '{text[:100]}' is not known; use symmetric:SHARE or pair:SHARE, such as symmetric:0.4."
            )
        return cls(kind, value)


def with_wrong_labels(
    labels: IntArray, clients: list[IntArray], classes: int, noise: LabelNoise, seed: int
) -> IntArray:
    """Return the labels with as many wrong ones at each client; unknown ones (-1) stay."""
    noisy = labels.copy()
    for client, rows in enumerate(clients):
        generator = numpy_generator(seed, "label-noise", client)
        known = rows[labels[rows] >= 0]
        wrong = generator.permutation(known)[: round(noise.share * len(known))]
        steps = generator.integers(1, classes, len(wrong)) if noise.kind == "symmetric" else 1
        noisy[wrong] = (labels[wrong] + steps) % classes
    return noisy
