"""Label histogram: how a client's images are distributed over the classes, from its update.

The attacker imitates one client for each class with its own images, and finds the mixture of these
changes that is nearest to the client's. A report with one number for each class is read as it is.
"""

import numpy as np
import torch

from fedvl.audit.evidence import Evidence, Seen, begun_alike
from fedvl.audit.finding import CLIENT, SERVER, Finding, Numbers, Outcome, Unmeasured, correlation, mean_of
from fedvl.audit.imitation import Coordinates, draw_rows, imitate, mixture, moved_names
from fedvl.seeding import torch_generator

NAME = "label-histogram"
NAMES = (NAME, "label-histogram-of-report")
ALIKE = 1e-3  # changes that differ by a smaller share are the same but for rounding
MEASURE = "correlation of the estimated and the true share of each class"


def attack(evidence: Evidence) -> list[Outcome]:
    if not any(evidence.histogram(client).any() for client in evidence.clients):
        sentence = "The training images have no true labels, so an estimate of them cannot be measured."
        return [Unmeasured(NAME, view, sentence) for view in (SERVER, CLIENT)]
    found: list[Outcome] = list(of_reports(evidence))
    for view, seen in ((SERVER, evidence.seen_by_server()), (CLIENT, evidence.seen_by_client())):
        if not any(each.change for each in seen):
            found.append(Unmeasured(NAME, view, not_seen(view)))
            continue
        estimates = estimate(evidence, seen)
        where = evidence.what_server_sees if view == SERVER else "the mean of the others' updates"
        found.append(judged(evidence, NAME, view, estimates, f"from {where}"))
    return found


def not_seen(view: str) -> str:
    if view == SERVER:
        return "No tensor of an update changes, so there is nothing to attack."
    return "Another client does not see how the mean of all updates changes the shared tensors."


def estimate(evidence: Evidence, seen: list[Seen]) -> dict[int, Numbers]:
    """Return each client's estimated shares, the mean over the rounds."""
    own, count = evidence.own, evidence.classes
    generator = torch_generator(0, "imitated classes")
    of_class = [torch.nonzero(own.labels.cpu() == c)[:, 0] for c in range(count)]
    known = [c for c in range(count) if len(of_class[c])]
    rows = [draw_rows(of_class[c], evidence.typical_size, generator) for c in known]
    everywhere = draw_rows(torch.arange(len(own)), max(evidence.typical_size, count), generator)
    mixed = [torch.cat([part, everywhere]) for part in rows]
    shares: dict[int, list[Numbers]] = {}
    for index, before, changes in begun_alike(evidence, seen):
        coordinates = Coordinates(moved_names(evidence, changes[0].change), changes[0].change)
        directions = torch.stack([coordinates.of(c) for c in imitate(evidence, own, rows, before, index)])
        apart = (directions - directions.mean(0)).norm()
        if apart <= ALIKE * directions.norm():  # a client of one class learns nothing by this method
            directions = torch.stack([coordinates.of(c) for c in imitate(evidence, own, mixed, before, index)])
        for each in changes:
            full = np.zeros(count)
            full[known] = mixture(directions, coordinates.of(each.change))
            shares.setdefault(each.client, []).append(full)
    return {client: np.mean(parts, axis=0) for client, parts in shares.items()}


def of_reports(evidence: Evidence) -> list[Finding]:
    """Read reports that have one number for each class."""
    estimates: dict[int, list[Numbers]] = {}
    for message in evidence.messages:
        for tensor in message.report.values():
            if tensor.shape == (evidence.classes,):
                estimates.setdefault(message.client, []).append(tensor.double().cpu().numpy())
    if not estimates:
        return []
    means = {client: np.mean(parts, axis=0) for client, parts in estimates.items()}
    where = "from the sum of all clients' counts" if evidence.summed else "from the counts that one client reports"
    return [judged(evidence, NAMES[1], SERVER, means, where)]


def judged(evidence: Evidence, name: str, view: str, estimates: dict[int, Numbers], where: str) -> Finding:
    clients = sorted(estimates)
    truths = [evidence.histogram(client) for client in clients]
    values = np.array([correlation(estimates[c], truth) for c, truth in zip(clients, truths, strict=True)])
    overall = np.sum([evidence.histogram(c) * len(rows) for c, rows in enumerate(evidence.training.rows)], axis=0)
    guess = float(np.mean([correlation(overall, truth) for truth in truths]))
    value, interval = mean_of(values)
    told = "can be told" if interval[0] > guess else "cannot be told"
    sentence = (
        f"How a client's images are distributed over the classes {told} {where}: the estimate correlates with the "
        f"truth by {value:z.2f} (1 is exact; who knows the class shares of all clients together reaches {guess:z.2f})."
    )
    return Finding(name, view, MEASURE, value, interval, guess, sentence)
