"""Label histogram: the class shares of a client's images, from anything that it sends.

The attacker imitates one client for each class with its own images, and finds the mixture of these
messages that is nearest to the client's; or it fits a linear probe from messages to class shares on
clients that it imitates. It does so for the update as a whole and for each item that leaves, and
takes what is best on imitated clients. A report with one number for each class is also read as it
is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvl.audit.candidates import Shadow, began_of, shadows_of, tailored, together
from fedvl.audit.evidence import Evidence, class_shares, seen_of_each_client
from fedvl.audit.finding import CLIENT, SERVER, Finding, Outcome, Unmeasured
from fedvl.audit.imitation import Coordinates, Mixture, draw_rows, imitate
from fedvl.audit.messages import LOW_BITS, Seen
from fedvl.evaluation.statistics import Numbers, correlation, mean_of_few
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

NAME = "label-histogram"
NAMES = (NAME, "label-histogram-of-report")
ALIKE = 1e-3  # changes that differ by a smaller share are the same but for rounding
PROBE_RIDGES = (0.01, 0.1, 1.0, 10.0)  # of a linear probe, as shares of the mean of its kernel's diagonal
WHOLE = "the update"
MEASURE = "correlation of the estimated and the true share of each class"


class EstimatedShares(NamedTuple):
    """Estimated shares of the classes by client, and the items that were tried."""

    shares: dict[int, Numbers]
    items: tuple[str, ...]
    best: tuple[str, ...]


def attack(evidence: Evidence) -> list[Outcome]:
    if not any(evidence.histogram(client).any() for client in evidence.clients):
        sentence = "The training images have no true labels, so an estimate of them cannot be measured."
        return [Unmeasured(NAME, view, sentence) for view in (SERVER, CLIENT)]
    found: list[Outcome] = list(of_reports(evidence))
    for view, seen in ((SERVER, evidence.seen_by_server()), (CLIENT, evidence.seen_by_client())):
        estimated = estimate(evidence, seen, evidence.summed or view == CLIENT)
        if estimated is None:
            found.append(Unmeasured(NAME, view, why_no_imitation(view)))
            continue
        where = evidence.what_server_sees if view == SERVER else "the mean of the others' updates"
        found.append(histogram_finding(evidence, NAME, view, estimated, f"from {where} ({', '.join(estimated.best)})"))
    return found


def why_no_imitation(view: str) -> str:
    if view == SERVER:
        return "Nothing that leaves depends on the images of imitated clients, so that this attack does not apply."
    return "Another client does not see how the mean of all updates changes the shared tensors."


def estimate(evidence: Evidence, seen: Sequence[Seen], of_sum: bool = False) -> EstimatedShares | None:
    """Return each client's estimated shares, the mean over rounds; None if nothing tells them."""
    shares: dict[int, list[Numbers]] = {}
    items, best = set[str](), set[str]()
    for client, all_seen in seen_of_each_client(seen):
        for each in all_seen:
            reader = reader_of(evidence, tailored(evidence, each), each, of_sum)
            items |= reader.examined
            if reader.best is not None:
                best.add(reader.best)
                shares.setdefault(client, []).append(reader.read(each.items))
    if not shares:
        return None
    means = {client: np.mean(parts, axis=0) for client, parts in shares.items()}
    return EstimatedShares(means, tuple(sorted(items)), tuple(sorted(best)))


def reader_of(evidence: Evidence, client: int | None, seen: Seen, of_sum: bool) -> "Reader":
    key = ("reader", client, seen.round_index, frozenset(seen.items), of_sum)
    return evidence.once(key, lambda: Reader(evidence, client, seen, of_sum))


class Reader:
    """The best way to read class shares off one round's messages, by imitated clients."""

    def __init__(self, evidence: Evidence, client: int | None, seen: Seen, of_sum: bool) -> None:
        self.index, self.classes = seen.round_index, evidence.classes
        self.directions = imitated_classes(evidence, client)
        self.labels = evidence.own.labels.cpu()
        # of other images than the probe's, so that it is not taken for better than it is
        self.trials = shadows_of(evidence, client)[1::2]
        slow = evidence.slow or evidence.method.through_encoder
        self.known = [] if slow else shadows_of(evidence, client, "known")
        if of_sum:
            self.trials, self.known = together(evidence, self.trials), together(evidence, self.known)
        names = [name for name in seen.items if not name.startswith(LOW_BITS)]
        parts = {WHOLE: list(seen.change), **{name: [name] for name in names}}
        ways = {label: way for label, part in parts.items() if (way := self._best_way(part)) is not None}
        self.examined = {name for label in ways for name in parts[label]}
        self.best = max(ways, key=lambda label: ways[label].success) if ways else None
        self.ways = ways

    def read(self, items: Tensors) -> Numbers:
        assert self.best is not None, "it was asked for"
        return self.ways[self.best].read(items)

    def _truths(self, shadows: list[Shadow]) -> list[Numbers]:
        return [class_shares(self.labels[shadow.rows], self.classes) for shadow in shadows]

    def _best_way(self, names: list[str]) -> "ShareReading | None":
        """Return the better of mixture and probe; None if the items never change in one shape."""
        of_classes, trials, known = (
            [seen[self.index].items for seen in each]
            for each in (self.directions.values(), *([s.seen for s in part] for part in (self.trials, self.known)))
        )
        everything = [*of_classes, *trials, *known]
        if not names or not all(items.keys() >= set(names) for items in everything):
            return None
        if len({tuple(tuple(items[name].shape) for name in names) for items in everything}) > 1:
            return None
        coordinates = Coordinates(names, trials[0])
        tables = [
            torch.stack([coordinates.of(items) for items in part]).double() if part else None
            for part in (of_classes, trials, known)
        ]
        assert tables[0] is not None
        if not any((table - table[0]).any() for table in tables if table is not None):
            return None
        models: list[Mixed | Probe] = [Mixed(tables[0], list(self.directions), self.classes)]
        if tables[2] is not None:
            models.append(Probe.fit(tables[2], np.stack(self._truths(self.known))))
        truths = self._truths(self.trials)
        ways = []
        for model in models:
            way = ShareReading(0.0, coordinates, model)
            right = [correlation(way.read(items), truth) for items, truth in zip(trials, truths, strict=True)]
            ways.append(way._replace(success=float(np.mean(right))))
        return max(ways, key=lambda way: way.success)


class ShareReading(NamedTuple):
    """One way to read shares, and how well it does on imitated clients."""

    success: float
    coordinates: Coordinates
    model: "Mixed | Probe"

    def read(self, items: Tensors) -> Numbers:
        return self.model.shares(self.coordinates.of(items))


class Mixed:
    """Shares as a mixture of clients of one class each."""

    def __init__(self, directions: Tensor, known: list[int], classes: int) -> None:
        self.mixture, self.known, self.classes = Mixture(directions), known, classes

    def shares(self, message: Tensor) -> Numbers:
        full = np.zeros(self.classes)
        full[self.known] = self.mixture.of(message)
        return full


class Probe(NamedTuple):
    """A ridge regression from messages to shares, in its kernel."""

    centre: Tensor
    scale: Tensor
    known: Tensor
    weights: Tensor
    mean: Numbers

    @classmethod
    def fit(cls, table: Tensor, truths: Numbers) -> "Probe":
        """Return the probe whose ridge is best when each message is left out."""
        centre, scale = table.mean(0), table.std(0, correction=0)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        known, mean = (table - centre) / scale, truths.mean(0)
        wanted, kernel = torch.from_numpy(truths - mean), known @ known.T
        values, vectors = torch.linalg.eigh(kernel)
        usual = float(kernel.diagonal().mean()) + 1e-12

        def weights_of(ridge: float) -> tuple[Tensor, float]:
            inverse = vectors @ ((1 / (values.clamp(min=0) + ridge * usual))[:, None] * vectors.T)
            weights = inverse @ wanted
            return weights, float((weights / inverse.diagonal()[:, None]).square().sum())

        weights, _ = min(map(weights_of, PROBE_RIDGES), key=lambda found: found[1])
        return cls(centre, scale, known, weights, mean)

    def shares(self, message: Tensor) -> Numbers:
        kernel = self.known @ ((message.double() - self.centre) / self.scale)
        found: Numbers = (kernel @ self.weights).numpy() + self.mean
        return found


def imitated_classes(evidence: Evidence, client: int | None) -> dict[int, list[Seen]]:
    """Return what clients of one class each would send, in each round."""
    return evidence.once(("classes", client), lambda: imitate_classes(evidence, client))


def imitate_classes(evidence: Evidence, client: int | None) -> dict[int, list[Seen]]:
    own, count, began = evidence.own, evidence.classes, began_of(evidence, client)
    generator = torch_generator(0, "imitated classes")
    of_class = [torch.nonzero(own.labels.cpu() == c)[:, 0] for c in range(count)]
    known = [c for c in range(count) if len(of_class[c])]
    rows = [draw_rows(of_class[c], evidence.typical_size, generator) for c in known]
    found = list(imitate(evidence, own, rows, began))
    if alike(found):  # a client of one class learns nothing by this method
        everywhere = draw_rows(torch.arange(len(own)), max(evidence.typical_size, count), generator)
        found = list(imitate(evidence, own, [torch.cat([part, everywhere]) for part in rows], began))
    return dict(zip(known, found, strict=True))


def alike(found: list[list[Seen]]) -> bool:
    """Whether the shared tensors change alike in all imitated clients."""
    names = list(found[0][0].change)
    if not names:
        return False
    changes = torch.stack([Coordinates(names, seen[0].change).of(seen[0].change) for seen in found])
    return bool((changes - changes.mean(0)).norm() <= ALIKE * changes.norm())


def of_reports(evidence: Evidence) -> list[Finding]:
    """Read reports that have one number for each class."""
    estimates: dict[int, list[Numbers]] = {}
    names = set[str]()
    for message in evidence.messages:
        reported = evidence.rounds[message.round_index].report if evidence.summed else message.report
        for name, tensor in reported.items():
            if tensor.shape == (evidence.classes,):
                estimates.setdefault(message.client, []).append(tensor.double().cpu().numpy())
                names.add(f"report of {name}")
    if not estimates:
        return []
    means = {client: np.mean(parts, axis=0) for client, parts in estimates.items()}
    where = "from the sum of all clients' counts" if evidence.summed else "from the counts that one client reports"
    return [histogram_finding(evidence, NAMES[1], SERVER, EstimatedShares(means, tuple(sorted(names)), ()), where)]


def histogram_finding(evidence: Evidence, name: str, view: str, estimated: EstimatedShares, where: str) -> Finding:
    clients = sorted(estimated.shares)
    truths = [evidence.histogram(client) for client in clients]
    values = np.array([correlation(estimated.shares[c], truth) for c, truth in zip(clients, truths, strict=True)])
    overall = np.sum([evidence.histogram(c) * len(rows) for c, rows in enumerate(evidence.training.rows)], axis=0)
    chance = float(np.mean([correlation(overall, truth) for truth in truths]))
    value, interval = mean_of_few(values)
    sentence = (
        f"The class shares of a client's images, estimated {where}, correlate with the true ones by {value:z.2f} (1 is "
        f"exact; the class shares of all clients together reach {chance:z.2f})."
    )
    counted = f"{len(clients)} client{'s' * (len(clients) > 1)}"
    return Finding(name, view, MEASURE, value, interval, chance, sentence, "r", estimated.items, counted)
