"""Picture from a feature: how near to the original image a recovered feature leads.

A feature that leaks is not yet an image. The attacker learns a linear map from features to pixels
on its own images, and applies it to the features that it recovered from clients of one image.
"""

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from fedvl.audit.evidence import Evidence
from fedvl.audit.feature_recovery import ALONE, form_of, recover_singles, sources_of
from fedvl.audit.finding import SERVER, Finding, Outcome, Unmeasured
from fedvl.evaluation.leakage import psnr
from fedvl.evaluation.statistics import mean_of, share_of

NAMES = ("picture", "picture-linking")
SIDE = 64  # pixels at which images are compared
RIDGES = (0.01, 0.1, 1.0, 10.0)  # of which the one is taken that predicts own images best


def attack(evidence: Evidence) -> list[Outcome]:
    sources = sources_of(evidence)
    if isinstance(sources, str) or evidence.summed:
        reason = sources if isinstance(sources, str) else ALONE
        return [Unmeasured(name, SERVER, reason) for name in NAMES]
    rows, recovered = recover_singles(evidence)
    form = form_of(evidence) or ""
    known = normalize(evidence.own.inputs[form].cpu().double(), dim=1)
    features = upright(torch.cat([found[:1] for found in recovered]), known)
    own = pixels(evidence, "test", evidence.own_rows.tolist())
    found = Decoder(known, own).pictures(features).clamp(0, 1)
    originals = pixels(evidence, "train", rows.tolist())
    others = pixels(evidence, evidence.outside_split, evidence.outside_rows.tolist())
    return picture_findings(
        found, originals, others, own.mean(0), tuple(sorted({n for each in sources for n in each.names}))
    )


def upright(found: Tensor, known: Tensor) -> Tensor:
    """Turn features so that they lie on the side of the known ones: a row may be the opposite."""
    signs = torch.where((found @ known.T).amax(1) >= (-found @ known.T).amax(1), 1.0, -1.0)
    return signs[:, None] * found


def pixels(evidence: Evidence, split: str, rows: list[int]) -> Tensor:
    """Return images as the encoder sees them, 0 to 1, but small."""
    prepared = evidence.prepared
    read, images = prepared.sources.dataset.splits[split], prepared.encoded.read[split].kept
    preprocess = evidence.method.task.clip.preprocess
    whole = (preprocess(read.read(int(images[row]))).double()[None] / 255 for row in rows)
    return torch.cat(
        [image if image.shape[-1] <= SIDE else interpolate(image, (SIDE, SIDE), mode="area") for image in whole]
    )


class Decoder:
    """A ridge regression from features to pixels."""

    def __init__(self, features: Tensor, images: Tensor) -> None:
        self.mean, self.centre, self.known = images.mean(0), features.mean(0), features - features.mean(0)
        wanted = (images - self.mean).flatten(1)
        values, vectors = torch.linalg.eigh(self.known @ self.known.T)
        turned = vectors.T @ wanted

        def error(ridge: float) -> float:
            """Return the squared error on images that are left out one by one."""
            share = values.clamp(min=0) / (values.clamp(min=0) + ridge)
            left = wanted - vectors @ (share[:, None] * turned)
            return float((left / (1 - (vectors.square() @ share))[:, None]).square().mean())

        best = min(RIDGES, key=error)
        self.weights = vectors @ (turned / (values.clamp(min=0) + best)[:, None])

    def pictures(self, features: Tensor) -> Tensor:
        moved = (features - self.centre) @ self.known.T @ self.weights
        return self.mean + torch.unflatten(moved, 1, self.mean.shape)


def picture_findings(
    found: Tensor, originals: Tensor, others: Tensor, mean: Tensor, items: tuple[str, ...] = ()
) -> list[Outcome]:
    """Compare pictures with their originals, and look for these among other images."""
    near = [psnr(picture, original) for picture, original in zip(found, originals, strict=True)]
    value, interval = mean_of(torch.tensor(near).double().numpy())
    usual = sum(psnr(mean, original) for original in originals) / len(originals)
    among = torch.cat([originals, others])

    def shape(images: Tensor) -> Tensor:
        return normalize((images - mean).flatten(1), dim=1)

    nearest = (shape(found) @ shape(among).T).argmax(1)
    hits, chance = int((nearest == torch.arange(len(found))).sum()), 1 / len(among)
    share, between = share_of(hits, len(found))
    counted = f"{len(found)} clients of one image"
    return [
        Finding(
            NAMES[0],
            SERVER,
            "PSNR of the picture made from a recovered feature",
            value,
            interval,
            usual,
            f"If a client trains on a single image, a picture made from its feature is within {value:.1f} dB of the "
            f"original (the mean of other images: {usual:.1f} dB; a good copy has more than 30).",
            " dB",
            items,
            counted,
        ),
        Finding(
            NAMES[1],
            SERVER,
            "share of the pictures whose original is found by its pixels",
            share,
            between,
            chance,
            f"If a client trains on a single image, its original is found by the picture's pixels among {len(among)} "
            f"images in {hits} of {len(found)} cases (chance level {100 * chance:.2g} %).",
            items=items,
            counted=counted,
        ),
    ]
