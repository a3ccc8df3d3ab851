"""Feature recovery: a client's encoded images, from any tensor that is as wide as a feature.

A layer that reads features changes by sums of them. Of one image each row is the feature itself. Of
several, single rows are often nearly one feature, and independent components of the rows separate
some more. Any other tensor whose numbers can be put into rows as wide as a feature is read in the
same way. The tensor and round that give most on imitated clients are taken. A recovered feature is
linked if the image it is nearest to, among the client's and many others, is the right one.
"""

import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.audit.candidates import Shadow, began_of, shadows_of, together
from fedvl.audit.evidence import Evidence
from fedvl.audit.finding import CLIENT, SERVER, USER, Finding, Outcome, Unmeasured, of_100
from fedvl.audit.imitation import CannotImitateError, draw_rows, imitate
from fedvl.audit.messages import LOW_BITS, NUMBERS, Seen
from fedvl.evaluation.statistics import mean_of, share_of
from fedvl.seeding import torch_generator

NAMES = ("feature-recovery", "feature-linking", "one-image-recovery", "one-image-linking")
FORMS = ("features", "embeddings")
MAX_COMPONENTS = 64  # independent components are sought among
MAX_RECOVERED_ROWS = 512  # of a tensor, and of features that are compared with each other at once
FAINT = 1e-4  # singular values below this share of the largest are rounding
SINGLE = 40  # imitated clients of one image
TRIALS = 6  # imitated clients by which a tensor is chosen
ALONE = "A client of a single image was not tried: the server sees its update in a sum with the others' alone."


class Source(NamedTuple):
    """Where features are read: in which round, in which tensors."""

    round_index: int
    names: tuple[str, ...]


def attack(evidence: Evidence) -> list[Outcome]:
    elsewhere: list[Outcome] = [
        Unmeasured(name, view, "It was tried from the server's view only; others see sums of what it sees.")
        for view in (CLIENT, USER)
        for name in NAMES[:1]
    ]
    sources = sources_of(evidence)
    if isinstance(sources, str):
        return [Unmeasured(name, SERVER, sources) for name in NAMES]
    source = best_source(evidence, sources)
    seen = [each for each in evidence.seen_by_server() if each.round_index == source.round_index]
    truths = [features_of(evidence, evidence.rows(each.client)) for each in seen]
    recovered = [read(evidence, each, source, len(truth)) for each, truth in zip(seen, truths, strict=True)]
    items = tuple(sorted({name for each in sources for name in each.names}))
    where = "the mean of all updates" if evidence.summed else "a client's message"
    found = recovery_findings(
        evidence, NAMES[:2], truths, recovered, f"From {where} ({', '.join(source.names)})", items
    )
    if evidence.summed:
        return [*found, *(Unmeasured(name, SERVER, ALONE) for name in NAMES[2:]), *elsewhere]
    try:
        rows, recovered = recover_singles(evidence)
    except CannotImitateError as error:
        return [*found, *(Unmeasured(name, SERVER, str(error)) for name in NAMES[2:]), *elsewhere]
    singles = [features_of(evidence, row) for row in torch.split(rows, 1)]
    one = recovery_findings(evidence, NAMES[2:], singles, recovered, "If a client trains on a single image", items)
    return [*found, *one, *elsewhere]


# --- where features are read


def form_of(evidence: Evidence) -> str | None:
    return next((form for form in FORMS if form in evidence.training.samples.inputs), None)


def width_of(evidence: Evidence) -> int:
    form = form_of(evidence)
    return evidence.training.samples.inputs[form].shape[-1] if form else 0


def sources_of(evidence: Evidence) -> list[Source] | str:
    """Return where features could be read, trained layers first, or why nowhere."""
    width = width_of(evidence)
    if not width:
        return "The method reads no features that are computed once, so that this attack does not apply."
    found = []
    for each in {each.round_index: each for each in reversed(evidence.seen_by_server())}.values():
        layers = tuple(name for name in each.change if is_layer(evidence, name, each.change[name]))
        others = [name for name in each.items if name not in layers and readable(name, each.items[name], width)]
        found += [Source(each.round_index, names) for names in (layers, *((name,) for name in others)) if names]
    found.sort(key=lambda source: source.round_index)
    return found or f"No tensor that leaves can be put into rows as wide as a feature ({width} numbers)."


def is_layer(evidence: Evidence, name: str, tensor: Tensor) -> bool:
    """Whether a tensor is trained, with rows as wide as a feature."""
    trained = evidence.method.role.shared(name).trained
    return trained and tensor.dim() == 2 and tensor.shape[1] == width_of(evidence)


def readable(name: str, tensor: Tensor, width: int) -> bool:
    return name not in NUMBERS and not name.startswith(LOW_BITS) and tensor.numel() > 0 and tensor.numel() % width == 0


def best_source(evidence: Evidence, sources: list[Source]) -> Source:
    """Return the source that links most images of imitated clients."""
    if len({source.names for source in sources}) == 1:
        return sources[0]
    shadows = shadows_of(evidence, None)[:TRIALS]
    if evidence.summed:
        shadows = together(evidence, shadows)

    def success(source: Source) -> float:
        return float(np.mean([linked_of(evidence, shadow, source) for shadow in shadows]))

    return max(sources, key=success)


def linked_of(evidence: Evidence, shadow: Shadow, source: Source) -> float:
    """Return the share of an imitated client's images that its message points to."""
    form, seen = form_of(evidence) or "", shadow.seen[source.round_index]
    if not seen.items.keys() >= set(source.names):
        return 0.0
    found = normalize(rows_in(evidence, seen, source, len(shadow.rows)), dim=1)
    among = normalize(evidence.own.inputs[form].double().cpu(), dim=1)
    nearest = (found @ among.T).abs().argmax(1)
    right = float(torch.isin(shadow.rows, nearest).double().mean())
    return right - len(found) / len(among)  # many guesses link some by chance


def read(evidence: Evidence, seen: Seen, source: Source, images: int) -> Tensor:
    """Return the features that a message gives away, as unit vectors."""
    return separate(rows_in(evidence, seen, source, images), images, own_features(evidence))


def rows_in(evidence: Evidence, seen: Seen, source: Source, images: int) -> Tensor:
    """Return tensors of a message as rows as wide as a feature.

    What weight decay did to trained layers in this many steps is undone: its settings are known.
    """
    training, width = evidence.experiment.training, width_of(evidence)
    steps = training.local_epochs * -(-images // training.batch_size)
    decay = 0.0 if training.optimiser == "adam" else training.weight_decay
    rows = []
    for name in source.names:
        tensor = seen.items[name].double()
        if name in seen.change and is_layer(evidence, name, tensor):
            rows.append(tensor + steps * decay * training.learning_rate * seen.before[name].double())
        elif tensor.dim() == 2 and tensor.shape[1] != width == tensor.shape[0]:
            rows.append(tensor.T)
        else:
            rows.append(tensor.reshape(-1, width))
    return torch.cat(rows).cpu()[:MAX_RECOVERED_ROWS]


# --- recovery


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


def separate(change: Tensor, images: int, known: Tensor) -> Tensor:
    """Return the rows of a change and its independent components, as unit vectors.

    Features are made alike in all directions by the covariance of ``known`` ones first.
    """
    _, sizes, basis = torch.linalg.svd(change, full_matrices=False)
    rank = int((sizes > FAINT * sizes[0].clamp(min=1e-30)).sum())
    count = min(rank, images, MAX_COMPONENTS)
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

    def make() -> tuple[Tensor, list[Tensor]]:
        sources = sources_of(evidence)
        assert not isinstance(sources, str), "there is something to read"
        source = best_source(evidence, sources)
        everything = torch.cat([evidence.rows(client) for client in evidence.clients])
        rows = draw_rows(everything, min(SINGLE, len(everything)), torch_generator(0, "single"))
        began = began_of(evidence, None)[: source.round_index + 1]
        found = imitate(evidence, evidence.training.samples, torch.split(rows, 1), began, noise="run")
        return rows, [read(evidence, seen[source.round_index], source, 1) for seen in found]

    return evidence.once("singles", make)


# --- how well


def recovery_findings(
    evidence: Evidence,
    names: tuple[str, ...],
    truths: list[Tensor],
    recovered: list[Tensor],
    when: str,
    items: tuple[str, ...],
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
    usual, hits = float(torch.cat(guesses).mean()), torch.cat(linked)
    share, between = share_of(float(hits.sum()), len(hits))
    by_chance = float(np.mean(chance))
    counted = f"{len(truths)} clients and {len(hits)} of their images"
    return [
        Finding(
            names[0],
            SERVER,
            "cosine of an image's feature and the nearest recovered one",
            cosine,
            interval,
            usual,
            f"{when}, a recovered feature has a cosine of {cosine:.2f} to the true one (1 is exact; features of other "
            f"images and means of classes reach {usual:.2f}).",
            items=items,
            counted=counted,
        ),
        Finding(
            names[1],
            SERVER,
            "share of the images that a recovered feature points to",
            share,
            between,
            by_chance,
            f"{when}, {of_100(share)} of 100 images are picked out by a recovered feature among {len(others):,} others "
            f"(chance level {100 * by_chance:.2g}).",
            items=items,
            counted=counted,
        ),
    ]
