"""Feature recovery: the encoded images of a client, from the change of a layer that reads them.

Such a layer (a trained tensor whose rows are as wide as a feature) changes by sums of features. Of
one image each row is the feature itself. Of several, single rows are often nearly one feature, and
independent components of the rows separate some more. A recovered feature is linked if the image it
is nearest to, among the client's and many others, is the right one.
"""

import warnings

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.audit.evidence import Evidence
from fedvl.audit.finding import CLIENT, SERVER, USER, Finding, Outcome, Unmeasured, mean_of, of_100
from fedvl.audit.imitation import draw_rows, imitate
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

NAMES = ("feature-recovery", "feature-linking", "one-image-recovery", "one-image-linking")
FORMS = ("features", "embeddings")
MOST_COMPONENTS = 64  # independent components are sought among
FAINT = 1e-4  # singular values below this share of the largest are rounding
EXACT = 0.9  # cosine from which on a feature counts as read off
SINGLE = 40  # imitated clients of one image
ALONE = "A client of a single image was not tried: the server sees its update in a sum with the others' alone."


def attack(evidence: Evidence) -> list[Outcome]:
    elsewhere: list[Outcome] = [
        Unmeasured(
            name, view, "It was tried from the server's view only, which sees most; others see sums of what it sees."
        )
        for view in (CLIENT, USER)
        for name in NAMES[:1]
    ]
    if reason := not_applicable(evidence):
        return [Unmeasured(name, SERVER, reason) for name in NAMES[::2]]
    first = {each.client: each for each in reversed(evidence.seen_by_server())}
    known = own_features(evidence)
    truths = [features_of(evidence, evidence.rows(client)) for client in first]
    recovered = [
        separate(layers_of(evidence, each.before, each.change, len(truth)), len(truth), known)
        for each, truth in zip(first.values(), truths, strict=True)
    ]
    seen = "the mean of all updates" if evidence.summed else "the updates"
    found = judged(evidence, NAMES[:2], truths, recovered, f"From {seen} of this run")
    if evidence.summed:
        return [*found, Unmeasured(NAMES[2], SERVER, ALONE), *elsewhere]
    rows, recovered = recover_singles(evidence)
    singles = [features_of(evidence, row) for row in torch.split(rows, 1)]
    one = judged(evidence, NAMES[2:], singles, recovered, "If a client trains on a single image")
    return [*found, *one, *elsewhere]


def not_applicable(evidence: Evidence) -> str | None:
    """Return why no layer that reads features is sent, or None."""
    if form_of(evidence) is None:
        return "The method reads no feature of an image that is computed once, so none can be read off an update."
    if not layers(evidence, evidence.messages[0].before):
        return "No tensor of an update has rows as wide as a feature, so none can be read off it."
    return None


def form_of(evidence: Evidence) -> str | None:
    return next((form for form in FORMS if form in evidence.training.samples.inputs), None)


def features_of(evidence: Evidence, rows: Tensor) -> Tensor:
    """Return the client's features as unit vectors."""
    form = form_of(evidence)
    assert form is not None
    return normalize(evidence.training.samples.inputs[form][rows].double().cpu(), dim=1)


def own_features(evidence: Evidence) -> Tensor:
    """Return the features of all images that no client has."""
    form = form_of(evidence)
    assert form is not None
    both = torch.cat([evidence.own.inputs[form], evidence.outside.inputs[form]])
    return normalize(both.double().cpu(), dim=1)


def layers(evidence: Evidence, tensors: Tensors) -> list[str]:
    """Return the trained tensors whose rows are as wide as a feature."""
    form, role = form_of(evidence), evidence.method.role
    width = evidence.training.samples.inputs[form].shape[-1] if form else 0
    return [name for name, t in tensors.items() if role.shared(name).trained and t.dim() == 2 and t.shape[1] == width]


def layers_of(evidence: Evidence, before: Tensors, change: Tensors, images: int) -> Tensor:
    """Return the change of the layers that read features, their rows below each other.

    What weight decay did to them in this many steps is undone: its settings are known.
    """
    training = evidence.experiment.training
    steps = training.local_epochs * -(-images // training.batch_size)
    decay = 0.0 if training.optimiser == "adam" else training.weight_decay
    factor = steps * decay * training.learning_rate
    rows = [change[name].double() + factor * before[name].double() for name in layers(evidence, change)]
    return torch.cat(rows).cpu()


def separate(change: Tensor, images: int, known: Tensor) -> Tensor:
    """Return the rows of a change and its independent components, as unit vectors.

    Features are made alike in all directions by the covariance of ``known`` ones first.
    """
    _, sizes, basis = torch.linalg.svd(change, full_matrices=False)
    rank = int((sizes > FAINT * sizes[0].clamp(min=1e-30)).sum())
    count = min(rank, images, MOST_COMPONENTS)
    if count <= 1:
        return normalize(basis[:1], dim=1)
    from sklearn.decomposition import FastICA

    values, directions = torch.linalg.eigh(torch.cov(known.T))
    whitened = basis[:count] @ (directions / values.clamp(min=float(values.max()) * FAINT).sqrt()) @ directions.T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what has not converged is still tried
        sources = FastICA(count, whiten="unit-variance", max_iter=300, random_state=0).fit_transform(whitened.T.numpy())
    unmixed = torch.linalg.lstsq(whitened.T, torch.from_numpy(sources)).solution
    large = change[change.norm(dim=1) > FAINT * change.norm(dim=1).max()]
    return normalize(torch.cat([large, unmixed.T @ basis[:count]]), dim=1)


def recover_singles(evidence: Evidence) -> tuple[Tensor, list[Tensor]]:
    """Return rows, and what is recovered from clients that have one of them each."""
    everything = torch.cat([evidence.rows(client) for client in evidence.clients])
    rows = draw_rows(everything, min(SINGLE, len(everything)), torch_generator(0, "single"))
    before = evidence.rounds[0].before
    changes = imitate(evidence, evidence.training.samples, torch.split(rows, 1), before, 0, as_run=True)
    return rows, [separate(layers_of(evidence, before, change, 1), 1, own_features(evidence)) for change in changes]


def judged(
    evidence: Evidence, names: tuple[str, ...], truths: list[Tensor], recovered: list[Tensor], when: str
) -> list[Finding]:
    """Compare what was recovered with the truth, and with as many images drawn from elsewhere."""
    others, own = own_features(evidence), evidence.own.labels.cpu()
    means = [others[: len(own)][own == c].mean(0) for c in torch.unique(own)]  # an image is like its class
    common = normalize(torch.stack(means), dim=1)
    generator = torch_generator(0, "guessed features")
    cosines, guesses, linked, chance = [], [], [], []
    for truth, found in zip(truths, recovered, strict=True):
        drawn = others[torch.randint(len(others), (len(found),), generator=generator)]
        cosines.append((truth @ found.T).abs().amax(1))
        guesses.append((truth @ torch.cat([drawn, common]).T).abs().amax(1))
        nearest = (found @ torch.cat([truth, others]).T).abs().argmax(1)
        linked.append(torch.isin(torch.arange(len(truth)), nearest).double())
        chance.append(1 - (1 - 1 / (len(truth) + len(others))) ** len(found))
    cosine, interval = mean_of(torch.cat(cosines).numpy())
    guess = float(torch.cat(guesses).mean())
    share, between = mean_of(torch.cat(linked).numpy())
    by_chance = float(np.mean(chance))
    told = "are not recovered by this attack"
    if interval[0] > guess:
        told = "can be read off an update" if cosine > EXACT else "come back in part"
    return [
        Finding(
            names[0],
            SERVER,
            "cosine of an image's feature and the nearest recovered one",
            cosine,
            interval,
            guess,
            f"{when}, the encoded images {told}: a recovered feature has a cosine of {cosine:.2f} to the true one "
            f"(1 is exact; features of other images and means of classes reach {guess:.2f}).",
        ),
        Finding(
            names[1],
            SERVER,
            "share of the images that a recovered feature points to",
            share,
            between,
            by_chance,
            f"{when}, {of_100(share)} of 100 images are picked out by a recovered feature among {len(others):,} "
            f"others (by chance {100 * by_chance:.2g}).",
        ),
    ]
