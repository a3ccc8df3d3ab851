"""Picture from a feature: pixels that the frozen encoder maps to a recovered feature.

A feature that leaks is not yet an image. The attacker searches for smooth pixels with that feature
(gradients through the encoder), starting from its own images' mean.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.audit.evidence import Evidence
from fedvl.audit.feature_recovery import form_of, not_applicable, recover
from fedvl.audit.finding import SERVER, Outcome, Finding, Unmeasured, mean_of, proportion
from fedvl.audit.imitation import draw_rows, imitate
from fedvl.evaluation.leakage import psnr
from fedvl.seeding import numpy_generator, torch_generator

NAMES = ("picture", "picture-linking")
PICTURES, OTHERS = 8, 200  # pictures sought, and images among which the original is looked for
STEPS, RATE, SMOOTH = 300, 0.03, 0.02


def attack(evidence: Evidence) -> list[Outcome]:
    if reason := not_applicable(evidence):
        return [Unmeasured(NAMES[0], SERVER, f"{reason} So there is no feature to make a picture of.")]
    everything = torch.cat([evidence.rows(client) for client in evidence.clients])
    rows = draw_rows(everything, min(PICTURES, len(everything)), torch_generator(0, "single"))
    before = evidence.rounds[0].before
    changes = imitate(evidence, evidence.training.samples, rows.split(1), before, 0)
    after = [{name: before[name].float() + moved for name, moved in change.items()} for change in changes]
    features = torch.cat([recover(evidence, before, tensors, 1)[:1] for tensors in after])
    originals = pixels(evidence, "train", rows.tolist())
    count = len(evidence.encoded.read["test"].kept)
    others = pixels(evidence, "test", numpy_generator(0, "others").permutation(count)[:OTHERS].tolist())
    found = search(evidence, features.float(), others.mean(0))
    return judged(found, originals, others)


def pixels(evidence: Evidence, split: str, rows: list[int]) -> Tensor:
    """Return images as the encoder sees them, 0 to 1."""
    read, images = evidence.sources.dataset.splits[split], evidence.encoded.read[split].kept
    encoder = evidence.method.task.clip
    return torch.stack([encoder.preprocess(read.read(int(images[row]))).float() / 255 for row in rows])


def search(evidence: Evidence, features: Tensor, start: Tensor) -> Tensor:
    """Return pixels (0 to 1) whose features have the largest cosine, of either sign, to these."""
    encoder = evidence.method.task.clip
    device = evidence.own.labels.device
    wanted = features.to(device)
    guess = start.clamp(0.02, 0.98).to(device)
    hidden = torch.logit(guess).expand(len(features), *start.shape).clone().requires_grad_()
    optimiser = torch.optim.Adam([hidden], lr=RATE)
    with torch.no_grad():  # a row of a change is the feature or its opposite
        own = normalize(evidence.own.inputs[form_of(evidence) or ""].float(), dim=-1)
        near, far = ((own @ (sign * wanted).T).amax(0) for sign in (1, -1))
        wanted = torch.where((near >= far)[:, None], wanted, -wanted)
    for _ in range(STEPS):
        images = torch.sigmoid(hidden)
        reached = normalize(encoder.encode_image(encoder.normalise(images)), dim=-1)
        rough = images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean()
        loss = (1 - (reached * wanted).sum(-1)).mean() + SMOOTH * rough * len(images)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return torch.sigmoid(hidden).detach().cpu()


def judged(found: Tensor, originals: Tensor, others: Tensor) -> list[Outcome]:
    """Compare pictures with their originals, and look for these among other images."""
    mean = others.mean(0)
    value, interval = mean_of(torch.tensor([psnr(a, b) for a, b in zip(found, originals, strict=True)]).double().numpy())
    guess = sum(psnr(mean, original) for original in originals) / len(originals)
    among = torch.cat([originals, others])

    def shape(images: Tensor) -> Tensor:
        return normalize((images - mean).flatten(1), dim=1)

    nearest = (shape(found) @ shape(among).T).argmax(1)
    hits, chance = int((nearest == torch.arange(len(found))).sum()), 1 / len(among)
    share = hits / len(found)
    return [
        Finding(
            NAMES[0],
            SERVER,
            "PSNR of the picture made from a recovered feature",
            value,
            interval,
            guess,
            f"If a client trains on a single image, a picture made from its feature is {value:.1f} dB near the original "
            f"(the mean of other images: {guess:.1f} dB; two photographs of the same thing are rarely above 20).",
            unit=" dB",
        ),
        Finding(
            NAMES[1],
            SERVER,
            "share of the pictures whose original is found by its pixels",
            share,
            proportion(hits, len(found)),
            chance,
            f"If a client trains on a single image, its original is found by the picture's pixels among {len(among)} "
            f"images in {hits} of {len(found)} cases (by chance {100 * chance:.2g} %).",
        ),
    ]
