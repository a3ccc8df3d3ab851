"""A federated evaluation at the server: counts of all sites, their figures, and who is missing."""

from pathlib import Path

from fedvl.deployment.membership import read_federation
from fedvl.deployment.own_counts import request_of
from fedvl.deployment.server import connected, wait_for_all
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import add, count
from fedvl.evaluation.figures import Evaluation, choose_thresholds, figures, half
from fedvl.runs.evaluation import AT_HALF, facts_of, shares_of
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared

NOTES = "evaluation-sums.json"
CHOSEN = "chosen on the server's test images, by Youden's index"
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
    place = Path(folder.federation["federation"])
    names = [str(name) for name in folder.result["class_names"]]
    with connected(folder, display, NOTES) as (engine, prepared):
        thresholds, source = thresholds_at_server(folder, prepared)
        wait_for_all(engine, read_federation(place), display)
        found = engine.evaluate(number, request_of(folder.tensors()[0]), len(names))
        refusals = engine.refused()
        sites = {client: engine.names[client] for client in sorted(engine.reporters)}
    refused = [f"{engine.names[each.client]}: {each.reason}" for each in refusals if each.client is not None]
    if not found:
        raise FedVLError(f"No site sent counts. {' '.join(refused) or 'None was connected, or none has test images.'}")
    tables = {sites[client]: counts for client, counts in found.items() if client is not None}
    return Evaluation(
        **facts_of(folder),
        images_from=SITES_TEST,
        thresholds_from=source,
        secure_sum=folder.experiment.federation.secure_sum,
        sites=list(sites.values()),
        missing=[name for name in engine.names if name not in sites.values()],
        refused=refused,
        pooled=figures(add(list(found.values())), names, thresholds),
        by_site={site: figures(counts, names, thresholds) for site, counts in tables.items()},
    )


def thresholds_at_server(folder: RunFolder, prepared: Prepared) -> tuple[list[int], str]:
    """Choose thresholds on the server's test images; a share of one half if it has none."""
    labels, shares = shares_of(prepared, *folder.tensors(), folder)
    if not len(labels):
        return [half()] * len(prepared.class_names), AT_HALF
    return choose_thresholds(count(labels, shares)), CHOSEN
