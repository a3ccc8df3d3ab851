"""Partition a dataset among clients as the papers do, and draw the classes that they test on.

Every scheme first draws a table of counts (clients x classes) and then assigns the samples, so a
draw that must be repeated is cheap, and the same table splits a test set. Every scheme terminates
on every input, assigns every sample exactly once and depends only on the labels, the
specification, the number of clients and the seed.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedvl.errors import FedVLError
from fedvl.seeding import numpy_generator

Indices = npt.NDArray[np.int64]

# The most Dirichlet draws; fewer are made if the table is so large that one draw is slow.
MAX_REDRAWS = 200
MAX_CELLS = 30_000_000

_EXAMPLES = {
    "dirichlet": "dirichlet:0.3",
    "shards": "shards:2",
    "quantity": "quantity:0.2",
    "domains+dirichlet": "domains+dirichlet:0.3",
    "pachinko": "pachinko:0.5",
    "only": "only:0",
}

# Of Dirichlet(WITHIN) are the shares of a group's classes under `pachinko` (alpha in the released code).
WITHIN = 10.0


@dataclass(frozen=True)
class Partition:
    """The samples of each client, and the draw that assigned them.

    `clients[k]` are the sorted indices of client k's samples. `counts` (clients x labels) is how
    many labelled samples of each class it holds. `note` is a sentence for the report.
    """

    clients: list[Indices]
    counts: Indices
    note: str
    spec: str
    seed: int


def is_partition_file(spec: str) -> bool:
    """Return whether a specification is the path of a file that says who holds what."""
    return spec.lower().endswith((".csv", ".json"))


def parse_spec(spec: str) -> tuple[str, float]:
    """Return the scheme of a specification such as `dirichlet:0.3` and its number, 0 if none."""
    if is_partition_file(spec):
        return "file", 0.0
    scheme, colon, text = spec.partition(":")
    if scheme in ("iid", "even", "disjoint", "domains", "domains+disjoint"):
        if colon:
            raise FedVLError(f"Partition '{spec}' takes no number; write just {scheme}.")
        return scheme, 0.0
    if scheme not in _EXAMPLES:
        raise FedVLError(
            f"Partition '{spec}' is not known; use iid, even, dirichlet:ALPHA, shards:CLASSES, quantity:FRACTION, "
            "pachinko:BETA, disjoint, domains, domains+dirichlet:ALPHA, domains+disjoint, or a .csv or .json file."
        )
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    needs = {
        "dirichlet": ("a positive number", value > 0 and math.isfinite(value)),
        "domains+dirichlet": ("a positive number", value > 0 and math.isfinite(value)),
        "pachinko": ("a positive number", value > 0 and math.isfinite(value)),
        "shards": ("a whole number of 1 or more", value >= 1 and value.is_integer()),
        "quantity": ("a fraction above 0 and at most 1", 0 < value <= 1),
        "only": ("the number of a client", value >= 0 and value.is_integer()),
    }
    what, right = needs[scheme]
    if not right:
        raise FedVLError(f"Partition '{spec}' needs {what} after the colon, for example {_EXAMPLES[scheme]}.")
    return scheme, value


def partition(
    labels: npt.NDArray[np.int64], spec: str, clients: int, seed: int, minimum: int = 10, classes: int = 1
) -> Partition:
    """Assign samples to clients by their labels (-1: none) or, for `domains`, by domain numbers.

    For `domains+` a number is domain * `classes` + label, for `pachinko` group * `classes` + label.
    `minimum` is how many samples a Dirichlet draw must give each client; other schemes ignore it.
    """
    scheme, value = parse_spec(spec)
    labels = _checked(labels)
    if clients < 1:
        raise FedVLError(f"A federation needs at least 1 client, not {clients}.")
    if scheme == "only":  # in a real federation this machine has the samples of one client
        return _held_by_one(labels, int(value), clients, spec, seed)
    if clients > len(labels):
        raise FedVLError(f"There are more clients ({clients}) than samples ({len(labels):,}); use fewer clients.")
    generator = numpy_generator(seed, "partition", spec, clients)
    if scheme == "iid":
        note = f"iid: {len(labels):,} samples were split at random among {clients} clients in equal parts."
        return _assign_evenly(labels, clients, generator, note, spec, seed)
    _need_labels(labels, spec)
    sizes = np.bincount(labels).astype(np.int64)
    present = np.flatnonzero(sizes)
    match scheme:
        case "even":
            drawn, note = _even(sizes[present], clients, generator)
        case "dirichlet":
            drawn, note = _dirichlet(sizes[present], value, clients, minimum, generator)
        case "shards":
            drawn, note = _shards(sizes[present], int(value), clients, generator)
        case "quantity":
            drawn, note = _quantity(sizes[present], value, clients, generator)
        case "pachinko":
            drawn, note = _pachinko(sizes[present], present // classes, value, clients, generator)
        case "domains":
            drawn, note = _domains(sizes[present], clients)
        case "domains+dirichlet":
            drawn, note = _within_domains(sizes[present], present // classes, value, clients, minimum, generator)
        case "domains+disjoint":
            drawn, note = _disjoint_in_domains(sizes[present], present // classes, clients, generator)
        case _:
            drawn, note = _disjoint(sizes[present], clients, generator)
    counts = np.zeros((clients, len(sizes)), np.int64)
    counts[:, present] = drawn
    empty = int((counts.sum(1) == 0).sum())
    note = f"{spec}: {note}" + (f", and {empty} clients hold no samples." if empty else ".")
    return Partition(_assign(labels, counts, generator), counts, note, spec, seed)


def partition_test(train: Partition, labels: npt.NDArray[np.int64]) -> Partition:
    """Split a test set by the draw that split the training set.

    Of each class a client gets the share that it holds of the training samples, rounded down or up
    at random, so it is never tested on a class that it does not hold. A class without training
    samples is shared by all. An iid training set has an iid test set.
    """
    labels = _checked(labels)
    clients = len(train.clients)
    generator = numpy_generator(train.seed, "partition", train.spec, clients, "test")
    scheme, value = parse_spec(train.spec)
    if scheme == "only":
        return _held_by_one(labels, int(value), clients, train.spec, train.seed)
    if scheme == "iid":
        note = f"iid: {len(labels):,} test samples were split at random among {clients} clients in equal parts."
        return _assign_evenly(labels, clients, generator, note, train.spec, train.seed)
    _need_labels(labels, train.spec)
    sizes = np.bincount(labels, minlength=train.counts.shape[1]).astype(np.int64)
    shares = np.zeros((clients, len(sizes)), np.int64)
    shares[:, : train.counts.shape[1]] = train.counts
    unseen = (shares.sum(0) == 0) & (sizes > 0)
    shares[:, shares.sum(0) == 0] = 1
    # Systematic sampling, in integers so that a client with no share gets nothing: the edges of the shares, scaled to
    # the size of the class and moved by one random offset, are rounded down.
    whole = shares.sum(0)
    edges = np.concatenate([np.zeros((1, len(sizes)), np.int64), shares.cumsum(0)])
    counts = np.diff((edges * sizes + generator.integers(whole)) // whole, axis=0)
    note = f"{train.spec}: test samples follow the classes and proportions of the training samples"
    note += f", and {int(unseen.sum())} classes without training samples are shared by all." if unseen.any() else "."
    return Partition(_assign(labels, counts, generator), counts, note, train.spec, train.seed)


def few_shot(labels: npt.NDArray[np.int64], shots: int, seed: int) -> Indices:
    """Return the sorted indices of `shots` samples of each class, or of all if it has fewer.

    Samples without a label are never chosen. With one seed, fewer shots are a subset of more.
    """
    labels = _checked(labels)
    if shots < 1:
        raise FedVLError(f"Few-shot training needs at least 1 image of each class, not {shots}.")
    if labels.max() < 0:
        raise FedVLError("Few-shot training needs labels, but no sample of this dataset has one.")
    order = _grouped(labels, numpy_generator(seed, "few-shot"))
    ordered = labels[order]
    rank = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return np.sort(order[(rank < shots) & (ordered >= 0)])


def long_tail(labels: npt.NDArray[np.int64], classes: int, ratio: float, seed: int) -> Indices:
    """Return the sorted indices of a long tail: class c of C keeps n ratio^(-c / (C - 1)) samples.

    n is the size of the largest class. A class keeps one sample at least, and all if it has fewer.
    """
    labels = _checked(labels)
    if labels.min() < 0:
        raise FedVLError("A long tail needs labels, and some training samples have none; leave data.long_tail out.")
    largest = np.bincount(labels).max()
    sizes = np.maximum(1, np.rint(largest * ratio ** (-np.arange(classes) / max(1, classes - 1)))).astype(np.int64)
    order = _grouped(labels, numpy_generator(seed, "long-tail"))
    rank = np.arange(len(order)) - np.searchsorted(labels[order], labels[order])
    return np.sort(order[rank < sizes[labels[order]]])


def open_split(class_count: int, clients: int, seed: int, asked: int | None = None) -> tuple[list[Indices], Indices]:
    """Return each client's classes and the test classes, which no client holds (Fed-MP).

    Each client holds C // (K + 1) classes. Unlike the fixed split of the released code, this one
    depends on the seed. With a number of classes ``asked`` about, these are the same for any number
    of clients, who share the others.
    """
    if asked is not None:
        if class_count - asked < clients:
            raise FedVLError(
                f"With data.asked_classes={asked} of {class_count} classes, {class_count - asked} are left for {clients} "
                "clients, who need one each; ask about fewer classes, or use fewer clients."
            )
        drawn = numpy_generator(seed, "asked-classes", class_count).permutation(class_count).astype(np.int64)
        shares = np.array_split(drawn[asked:], clients)
        return [np.sort(share) for share in shares], np.sort(drawn[:asked])
    each = class_count // (clients + 1)
    if clients < 1 or each < 1:
        raise FedVLError(
            f"An open-vocabulary split needs a class for each client and one for the test, but there are {clients} "
            f"clients and {class_count} classes; use between 1 and {max(1, class_count - 1)} clients."
        )
    classes = numpy_generator(seed, "open-split", class_count, clients).permutation(class_count).astype(np.int64)
    held = [np.sort(classes[k * each : (k + 1) * each]) for k in range(clients)]
    return held, np.sort(classes[clients * each :])


def _checked(labels: npt.NDArray[np.int64]) -> Indices:
    labels = np.asarray(labels, dtype=np.int64)
    if labels.ndim != 1 or len(labels) == 0:
        raise FedVLError("There are no samples to partition; check that the dataset holds readable images.")
    if labels.min() < -1:
        raise FedVLError(f"Label {labels.min()} is out of range; labels start at 0, and -1 means unlabelled.")
    return labels


def _need_labels(labels: Indices, spec: str) -> None:
    without = int((labels < 0).sum())
    if without:
        raise FedVLError(
            f"Partition '{spec}' needs labels, but {without:,} samples have none; use iid (--partition iid)."
        )


def _grouped(labels: Indices, generator: np.random.Generator) -> Indices:
    """Return all indices, class by class, in random order within each class."""
    shuffled = generator.permutation(len(labels)).astype(np.int64)
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def _assign(labels: Indices, counts: Indices, generator: np.random.Generator) -> list[Indices]:
    """Assign random samples of each class to each client, with the counts of the table."""
    clients, classes = counts.shape
    owner = np.empty(len(labels), np.int64)
    owner[_grouped(labels, generator)] = np.repeat(np.tile(np.arange(clients), classes), counts.T.reshape(-1))
    return _by_owner(owner, clients)


def _assign_evenly(
    labels: Indices, clients: int, generator: np.random.Generator, note: str, spec: str, seed: int
) -> Partition:
    owner = generator.permutation(np.arange(len(labels)) % clients)
    counts = np.zeros((clients, int(labels.max()) + 1), np.int64)
    labelled = labels >= 0
    np.add.at(counts, (owner[labelled], labels[labelled]), 1)
    return Partition(_by_owner(owner, clients), counts, note, spec, seed)


def _held_by_one(labels: Indices, client: int, clients: int, spec: str, seed: int) -> Partition:
    return Partition(
        _by_owner(np.full(len(labels), client), clients),
        np.stack([np.bincount(labels[labels >= 0]) * (number == client) for number in range(clients)]),
        f"{spec}: all {len(labels):,} samples are client {client}'s.",
        spec,
        seed,
    )


def _by_owner(owner: Indices, clients: int) -> list[Indices]:
    sizes = np.bincount(owner, minlength=clients)
    return list(np.split(np.argsort(owner, kind="stable").astype(np.int64), np.cumsum(sizes)[:-1]))


def _dirichlet(
    sizes: Indices, alpha: float, clients: int, minimum: int, generator: np.random.Generator
) -> tuple[Indices, str]:
    """Draw label skew (NIID-Bench, FedNTD, FedPP): each class in Dirichlet(alpha) proportions.

    Clients that are full get no more. The papers draw until every client has `minimum` samples,
    which takes about 15,000 draws for 100 clients and alpha 0.05. Here the number of draws is
    limited, and then the draw that is short of the fewest samples is repaired.
    """
    total, requested = int(sizes.sum()), minimum
    if total < clients * minimum:
        # Half the mean keeps the clients unequal; the mean itself would make them equal.
        minimum = max(1, total // (2 * clients))
    lowered = f" (not {requested}, for which there are too few samples)" if minimum != requested else ""
    draws = max(1, min(MAX_REDRAWS, MAX_CELLS // (len(sizes) * (clients + 200))))  # a row costs as much as 200 cells
    best, best_draw, best_shortfall = np.zeros((clients, len(sizes)), np.int64), 0, total + 1
    for draw in range(1, draws + 1):
        counts = _dirichlet_draw(sizes, alpha, clients, generator)
        shortfall = int(np.maximum(minimum - counts.sum(1), 0).sum())
        if shortfall == 0:
            return counts, f"draw {draw} gave each of {clients} clients at least {minimum} samples{lowered}"
        if shortfall < best_shortfall:
            best, best_draw, best_shortfall = counts, draw, shortfall
    moved = _repair(best, minimum)
    return best, (
        f"none of {draws} draws gave each of {clients} clients {minimum} samples{lowered}, "
        f"so draw {best_draw} was repaired by moving {moved:,} of {total:,} samples from the largest clients"
    )


def _dirichlet_draw(sizes: Indices, alpha: float, clients: int, generator: np.random.Generator) -> Indices:
    logarithms = _log_gamma(alpha, (len(sizes), clients), generator)
    counts = np.empty((len(sizes), clients), np.int64)
    held = np.zeros(clients, np.int64)
    full = sizes.sum() / clients
    for row, size, logarithm in zip(counts, sizes, logarithms, strict=True):
        # Some client can always take more: they cannot all hold the mean while samples are left.
        logarithm = np.where(held < full, logarithm, -np.inf)
        edges = np.exp(logarithm - logarithm.max()).cumsum()
        # Divided by its last entry, so that the last edge is the size exactly and rounding gives a full client nothing.
        row[:] = np.diff(np.floor(edges / edges[-1] * size), prepend=0)
        held += row
    return counts.T.copy()


def _log_gamma(alpha: float, shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw logarithms of gamma variates, by gamma(a) = gamma(a + 1) U^(1/a).

    For a small alpha the variates themselves underflow.
    """
    logarithms = np.log(generator.standard_gamma(alpha + 1, shape))
    added: npt.NDArray[np.float64] = np.log1p(-generator.random(shape)) / max(alpha, 1e-300)
    return logarithms + added


def _repair(counts: Indices, minimum: int) -> int:
    """Move samples from the largest clients to those below `minimum`; return how many moved."""
    held = counts.sum(1)
    moved = 0
    while held.min() < minimum:
        poor, rich = int(held.argmin()), int(held.argmax())
        label = int(counts[rich].argmax())
        amount = min(minimum - held[poor], held[rich] - minimum, counts[rich, label])
        counts[rich, label] -= amount
        counts[poor, label] += amount
        held[rich] -= amount
        held[poor] += amount
        moved += int(amount)
    return moved


def _shards(sizes: Indices, each: int, clients: int, generator: np.random.Generator) -> tuple[Indices, str]:
    """Draw FedNTD's shards: each client gets `each` shards, so at most that many classes."""
    shards = each * clients
    if shards < len(sizes):
        raise FedVLError(
            f"Partition 'shards:{each}' gives {clients} clients {shards} shards, too few for {len(sizes)} classes; "
            f"use shards:{math.ceil(len(sizes) / clients)} or more clients."
        )
    if shards > sizes.sum():
        raise FedVLError(
            f"Partition 'shards:{each}' needs {shards} samples for {clients} clients, but there are {sizes.sum()}; "
            "use fewer shards or fewer clients."
        )
    # One shard per class, then always one more for the class with the largest shards: with equal classes this is
    # S K / C for each, with unequal ones it keeps the clients as equal as possible, and no shard is empty.
    pieces = np.ones(len(sizes), np.int64)
    tie_break = generator.permutation(len(sizes))
    queue = [(-float(size), int(tie), label) for label, (size, tie) in enumerate(zip(sizes, tie_break, strict=True))]
    heapq.heapify(queue)
    for _ in range(shards - len(sizes)):
        _, tie, label = queue[0]
        pieces[label] += 1
        heapq.heapreplace(queue, (-float(sizes[label] / pieces[label]), tie, label))
    tokens = generator.permutation(np.repeat(np.arange(len(sizes)), pieces))
    counts = np.zeros((clients, len(sizes)), np.int64)
    cut = np.zeros(len(sizes), np.int64)
    for position, label in enumerate(tokens):
        counts[position // each, label] += (sizes[label] + cut[label]) // pieces[label]
        cut[label] += 1
    return counts, f"{clients} clients drew {each} of {shards} shards each, so at most {each} classes"


def _quantity(sizes: Indices, fraction: float, clients: int, generator: np.random.Generator) -> tuple[Indices, str]:
    """Draw FedPP's quantity skew: each class is split in random parts among some of the clients.

    As in the released code each class goes to int(fraction K) clients, at least one, and neighbours
    hold the same classes; here classes are shuffled and assigned in turn, so that clients hold
    equally many and no client is empty.
    """
    holders = max(1, int(fraction * clients + 1e-9))  # 0.29 * 100 is 28.999...
    raised = ""
    if holders * len(sizes) < clients:
        holders = math.ceil(clients / len(sizes))
        raised = " (more than requested, so that every client has one)"
    counts = np.zeros((clients, len(sizes)), np.int64)
    for rank, label in enumerate(generator.permutation(len(sizes))):
        chosen = (rank * holders + np.arange(holders)) % clients
        counts[chosen, label] = _random_parts(int(sizes[label]), holders, int(sizes[label]) // clients, generator)
    return counts, f"each of {len(sizes)} classes was split at random among {holders} of {clients} clients{raised}"


def _random_parts(total: int, parts: int, least: int, generator: np.random.Generator) -> Indices:
    """Return uniformly random whole numbers that sum to the total.

    Each is at least `least` and at least 1; if the total is too small for that, each is 0 or 1.
    """
    if total < parts:
        return generator.permutation(np.arange(parts) < total).astype(np.int64)
    least = max(1, least)
    spare = total - least * parts
    cuts = np.sort(generator.choice(spare + parts - 1, parts - 1, replace=False))
    return np.diff(cuts, prepend=-1, append=spare + parts - 1) - 1 + least


def _pachinko(
    sizes: Indices, groups: Indices, beta: float, clients: int, generator: np.random.Generator
) -> tuple[Indices, str]:
    """Draw pachinko allocation (FedPGP, PromptFolio and pFedMoAP on CIFAR-100), in equal parts.

    Each client draws shares of the groups from Dirichlet(beta) and shares of each group's classes
    from Dirichlet(10), and then for every sample a group and a class of it. Classes that are used
    up leave the draw, and the rest of their group keeps its proportions.
    """
    counts, left = np.zeros((clients, len(sizes)), np.int64), sizes.copy()
    order = generator.permutation(clients)  # the last clients get what is left
    for rank, client in enumerate(order):
        of_groups = _log_gamma(beta, (int(groups.max()) + 1,), generator)
        of_classes = _log_gamma(WITHIN, (len(sizes),), generator)
        share = int(sizes.sum()) // clients + (rank < int(sizes.sum()) % clients)
        while missing := share - int(counts[client].sum()):
            chances = _chances(of_groups, of_classes, groups, left > 0)
            drawn = generator.choice(len(sizes), missing, p=chances)
            sequence = np.argsort(drawn, kind="stable")
            times = np.empty(missing, np.int64)  # that a class has been drawn, at each place of the sequence
            times[sequence] = np.arange(missing) - np.searchsorted(drawn[sequence], drawn[sequence]) + 1
            last = np.flatnonzero(times == left[drawn])[:1]  # where the first class is used up
            taken = np.bincount(drawn[: last[0] + 1] if len(last) else drawn, minlength=len(sizes))
            counts[client] += taken
            left -= taken
    count = len(np.unique(groups))
    return counts, f"{clients} clients drew equally many samples, each from its own mix of {count} groups of classes"


def _chances(
    of_groups: npt.NDArray[np.float64],
    of_classes: npt.NDArray[np.float64],
    groups: Indices,
    left: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float64]:
    """Return the chance of each class: its group's among those left, times its own in the group."""
    chances = np.zeros(len(groups))
    present = np.unique(groups[left])
    for group, weight in zip(present, np.exp(of_groups[present] - of_groups[present].max()), strict=True):
        inside = np.flatnonzero((groups == group) & left)
        within = np.exp(of_classes[inside] - of_classes[inside].max())
        chances[inside] = weight * within / within.sum()
    chances /= chances.sum()
    return chances


def _even(sizes: Indices, clients: int, generator: np.random.Generator) -> tuple[Indices, str]:
    """Deal each class evenly (CacheFL's IID, appendix B.1): counts per class differ by one.

    The samples that are over go on where those of the class before ended, so that clients hold
    equally many in all, by one.
    """
    order, over = generator.permutation(clients), np.cumsum(sizes % clients)
    counts = np.tile(sizes // clients, (clients, 1))
    for label, extra in enumerate(sizes % clients):
        counts[order[(over[label] - extra + np.arange(extra)) % clients], label] += 1
    return counts, f"each of {len(sizes)} classes was dealt evenly among {clients} clients"


def _disjoint(sizes: Indices, clients: int, generator: np.random.Generator) -> tuple[Indices, str]:
    """Draw blocks of classes that no other client has, as equal in number as possible.

    PromptFL, FedTPG and CacheFL's `pat` use it.
    """
    if clients > len(sizes):
        raise FedVLError(
            f"Partition 'disjoint' needs a class for each client, but there are {clients} clients "
            f"and {len(sizes)} classes; use at most {len(sizes)} clients."
        )
    counts = np.zeros((clients, len(sizes)), np.int64)
    for client, block in enumerate(np.array_split(generator.permutation(len(sizes)), clients)):
        counts[client, block] = sizes[block]
    return counts, f"{len(sizes)} classes were shuffled and split among {clients} clients"


def _domains(sizes: Indices, clients: int) -> tuple[Indices, str]:
    """Assign each client to one domain (a hospital, a vendor), whose clients share it evenly."""
    counts = np.zeros((clients, len(sizes)), np.int64)
    for domain, block in enumerate(_clients_of_domains(len(sizes), clients)):
        counts[block, domain] = sizes[domain] // len(block)
        counts[block[: sizes[domain] % len(block)], domain] += 1
    return counts, f"each of {clients} clients holds samples of one of {len(sizes)} domains"


def _within_domains(
    sizes: Indices, domains: Indices, alpha: float, clients: int, minimum: int, generator: np.random.Generator
) -> tuple[Indices, str]:
    """Assign each client to one domain, whose classes its clients share by a Dirichlet draw."""
    counts = np.zeros((clients, len(sizes)), np.int64)
    present = np.unique(domains)
    notes = []
    for domain, block in zip(present, _clients_of_domains(len(present), clients), strict=True):
        columns = np.flatnonzero(domains == domain)
        drawn, note = _dirichlet(sizes[columns], alpha, len(block), minimum, generator)
        counts[np.ix_(block, columns)] = drawn
        notes.append(note)
    return counts, f"each of {clients} clients holds samples of one of {len(present)} domains; {'; '.join(notes)}"


def _disjoint_in_domains(
    sizes: Indices, domains: Indices, clients: int, generator: np.random.Generator
) -> tuple[Indices, str]:
    """Assign each client to one domain, whose classes its clients share out (FedTPG)."""
    counts = np.zeros((clients, len(sizes)), np.int64)
    columns = [np.flatnonzero(domains == domain) for domain in np.unique(domains)]
    _clients_of_domains(len(columns), clients)
    first = 0
    for own, count in zip(columns, share_clients([len(own) for own in columns], clients), strict=True):
        drawn, _ = _disjoint(sizes[own], count, generator)
        counts[np.ix_(np.arange(first, first + count), own)] = drawn
        first += count
    return counts, f"each of {clients} clients holds classes of one of {len(columns)} domains that no other holds"


def share_clients(classes: Sequence[int], clients: int) -> list[int]:
    """Share clients among domains, one at least, so that all have about as many classes."""
    shares = [1] * len(classes)
    for _ in range(clients - len(classes)):
        shares[int(np.argmax([count / share for count, share in zip(classes, shares, strict=True)]))] += 1
    return shares


def _clients_of_domains(domains: int, clients: int) -> list[Indices]:
    if clients < domains:
        raise FedVLError(f"Partition 'domains' needs a client for each of {domains} domains, not {clients} clients.")
    return np.array_split(np.arange(clients), domains)
