"""A federated evaluation at the server: counts of all sites, their figures, and who is missing."""

import math
from pathlib import Path

import numpy as np

from fedvl.deployment.membership import read_federation
from fedvl.deployment.own_counts import image_noise, request_of
from fedvl.deployment.remote import SiteCounts
from fedvl.deployment.server import connected, wait_for_all
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import MERGED, add_counts
from fedvl.evaluation.figures import Evaluation, PairedModels, figures_of_counts, half, paired_counts
from fedvl.evaluation.noisy_counts import coarse_shapes, figures_with_noise
from fedvl.runs.contents import Federation
from fedvl.runs.evaluation import AT_HALF, facts_of, read_thresholds
from fedvl.runs.folder import RunFolder

SUMS_FILE = "evaluation-sums.json"
SITES_TEST = "the sites' own test images"


def evaluate_sites(
    folder: RunFolder,
    number: int,
    display: Display,
    against: RunFolder | None = None,
    noise: tuple[float, float] | None = None,
) -> Evaluation:
    """Let every connected site count its test images; ``number``: of the evaluation, from 1.

    ``against``: another run of the same sites, whose model is compared on the same images.
    ``noise``: epsilon and delta of noise on the counts.
    """
    if noise is not None and against is not None:
        raise FedVLError("A comparison of two models has no noise; leave out --epsilon or --against.")
    place = check_evaluated(folder, noise is not None)
    names = folder.result.class_names
    chosen = read_thresholds(folder)
    shared, travelling = folder.tensors()[0], chosen.bins(names) if chosen else []
    if against is None:
        request = request_of(shared, travelling, noise=noise)
    else:
        check_pair(folder, against)
        request = request_of(shared, travelling, federation_of(against).run, against.tensors()[0])
    thresholds = travelling or [half()] * len(names)
    with connected(folder, display, SUMS_FILE) as (engine, _):
        wait_for_all(engine, read_federation(place))
        found = engine.evaluate(number, request, len(names)) if noise is None else {}
        noisy = engine.evaluate_with_noise(number, request, len(names)) if noise is not None else {}
        refusals = engine.refused()
        sites = {client: engine.names[client] for client in sorted(engine.reporters)}
    refused = [f"{engine.names[each.client]}: {each.reason}" for each in refusals if each.client is not None]
    if not found and not noisy:
        raise FedVLError(f"No site sent counts. {' '.join(refused) or 'None was connected, or none has test images.'}")
    refused += [
        f"{sites[client]}: its counts of both models are withheld; one is of few images (least_cell of its policy)."
        for client, each in found.items()
        if client is not None and withholds(each)
    ]
    if noise is None:
        single = {sites[client]: each.counts for client, each in found.items() if client is not None}
        pooled = figures_of_counts(add_counts([each.counts for each in found.values()]), names, thresholds)
        by_site = {site: figures_of_counts(counts, names, thresholds) for site, counts in single.items()}
    else:
        federation = folder.experiment.federation
        added = image_noise(*noise, len(names), federation.least_clients if federation.secure_sum else 1).deviation
        total = {
            name: np.stack([tables[name] for tables in noisy.values()]).sum(0) for name in coarse_shapes(len(names))
        }
        pooled = figures_with_noise(total, added * math.sqrt(len(sites)), names, thresholds)
        by_site = {
            sites[client]: figures_with_noise(tables, added, names, thresholds)
            for client, tables in noisy.items()
            if client is not None
        }
    return Evaluation(
        **facts_of(folder, folder.result),
        images_from=SITES_TEST,
        thresholds_from=chosen.chosen if chosen else AT_HALF,
        secure_sum=folder.experiment.federation.secure_sum,
        sites=list(sites.values()),
        missing=[name for name in engine.names if name not in sites.values()],
        refused=refused,
        pooled=pooled,
        by_site=by_site,
        epsilon=noise[0] if noise else None,
        delta=noise[1] if noise else None,
        against=None if against is None else compared_at_sites(against, list(found.values())),
    )


def federation_of(folder: RunFolder) -> Federation:
    if folder.federation is None:
        raise FedVLError(f"The run in {folder.path} is not one between machines; give a run of the same federation.")
    return folder.federation


def check_evaluated(folder: RunFolder, noisy: bool = False) -> Path:
    """Refuse a run without a model, or counts without noise of one that has noise.

    Return the folder of its federation.
    """
    place = Path(federation_of(folder).federation)
    if not folder.finished:
        raise FedVLError(f"The run in {folder.path} is not finished; go on with it by fedvl resume {folder.path}.")
    if folder.experiment.privacy.unit != "none" and not noisy:
        raise FedVLError(
            "Clients of a run with --privacy send no counts without noise; say how much it may tell: --epsilon."
        )
    return place


def check_pair(folder: RunFolder, against: RunFolder) -> None:
    """Refuse a comparison with a run of other sites or classes, or with less protection."""
    if check_evaluated(against).resolve() != check_evaluated(folder).resolve():
        raise FedVLError(f"The run in {against.path} is of another federation, whose sites have other images.")
    if against.result.class_names != folder.result.class_names:
        raise FedVLError(f"The run in {against.path} has other classes, so that the two models cannot be compared.")
    if against.experiment.federation.secure_sum and not folder.experiment.federation.secure_sum:
        raise FedVLError(
            f"The run in {against.path} is one of secure sums, and {folder.path} is not: clients send counts of both in a "
            "secure sum only. Evaluate the first against the second."
        )


def withholds(found: SiteCounts) -> bool:
    return found.paired is not None and bool((found.paired == MERGED).any())


def compared_at_sites(against: RunFolder, counts: list[SiteCounts]) -> PairedModels | None:
    """Return McNemar's test of the sites that gave their counts of two models; None if none did."""
    given = [each.paired for each in counts if each.paired is not None and not withholds(each)]
    if not given:
        return None
    both, gained, lost, neither = np.stack(given).sum(0).tolist()
    images = both + gained + lost + neither
    return paired_counts(against.path.resolve().name, gained, lost, images) if images else None
