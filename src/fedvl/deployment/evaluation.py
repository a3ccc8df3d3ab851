"""A federated evaluation at the server: counts of all sites, their figures, and who is missing."""

from pathlib import Path

from fedvl.deployment.membership import read_federation
from fedvl.deployment.own_counts import request_of
from fedvl.deployment.server import connected, wait_for_all
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import add_counts
from fedvl.evaluation.figures import Evaluation, figures_of_counts, half
from fedvl.runs.evaluation import AT_HALF, facts_of, read_thresholds
from fedvl.runs.folder import RunFolder

SUMS_FILE = "evaluation-sums.json"
SITES_TEST = "the sites' own test images"


def evaluate_sites(folder: RunFolder, number: int, display: Display) -> Evaluation:
    """Let every connected site count its test images; ``number``: of the evaluation, from 1."""
    assert folder.federation is not None
    if not folder.finished:
        raise FedVLError(f"The run in {folder.path} is not finished; go on with it by fedvl resume {folder.path}.")
    if folder.experiment.privacy.unit != "none":
        raise FedVLError(
            "The counts of an evaluation have no noise, and clients of a run with --privacy send nothing without; each "
            "client's own report has the accuracy on its images."
        )
    place = Path(folder.federation.federation)
    names = folder.result.class_names
    chosen = read_thresholds(folder)
    thresholds = chosen.bins(names) if chosen else [half()] * len(names)
    with connected(folder, display, SUMS_FILE) as (engine, _):
        wait_for_all(engine, read_federation(place))
        found = engine.evaluate(number, request_of(folder.tensors()[0]), len(names))
        refusals = engine.refused()
        sites = {client: engine.names[client] for client in sorted(engine.reporters)}
    refused = [f"{engine.names[each.client]}: {each.reason}" for each in refusals if each.client is not None]
    if not found:
        raise FedVLError(f"No site sent counts. {' '.join(refused) or 'None was connected, or none has test images.'}")
    tables = {sites[client]: counts for client, counts in found.items() if client is not None}
    return Evaluation(
        **facts_of(folder, folder.result),
        images_from=SITES_TEST,
        thresholds_from=chosen.chosen if chosen else AT_HALF,
        secure_sum=folder.experiment.federation.secure_sum,
        sites=list(sites.values()),
        missing=[name for name in engine.names if name not in sites.values()],
        refused=refused,
        pooled=figures_of_counts(add_counts(list(found.values())), names, thresholds),
        by_site={site: figures_of_counts(counts, names, thresholds) for site, counts in tables.items()},
    )
