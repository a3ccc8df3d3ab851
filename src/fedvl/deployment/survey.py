"""A survey at the server: counts of all sites before training, and who is missing."""

from datetime import UTC, datetime
from pathlib import Path

from fedvl.data.survey import Survey, add_surveys, survey_of
from fedvl.deployment.membership import read_federation
from fedvl.deployment.server import connected, wait_for_all
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.files import write_whole
from fedvl.runs.folder import RunFolder

FILE, NOTES = "survey.json", "survey-sums.json"


def survey_sites(folder: RunFolder, display: Display, with_names: bool = False) -> Survey:
    """Let every connected site count its images; write survey.json into the folder.

    ``with_names``: also compare the names of their classes, which sites send if they may.
    """
    assert folder.federation is not None
    if folder.experiment.privacy.unit != "none":
        raise FedVLError(
            "The counts of a survey have no noise, and clients of a run with --privacy send nothing without."
        )
    federation = read_federation(Path(folder.federation.federation))
    with connected(folder, display, NOTES) as (engine, _):
        wait_for_all(engine, federation)
        names = engine.class_names() if with_names else {}
        found = engine.survey(len(federation.class_names))
        refusals = engine.refused()
        sites = [engine.names[client] for client in sorted(engine.reporters)]
    refused = [f"{engine.names[each.client]}: {each.reason}" for each in refusals if each.client is not None]
    if not found:
        raise FedVLError(f"No site sent counts. {' '.join(refused) or 'None was connected.'}")
    survey = survey_of(
        add_surveys(list(found.values())),
        federation.class_names,
        sites,
        [name for name in engine.names if name not in sites],
        refused,
        folder.experiment.federation.secure_sum,
        datetime.now(UTC).isoformat(timespec="seconds"),
        {engine.names[client]: each for client, each in sorted(names.items())},
    )
    write_whole(folder.file(FILE), survey.model_dump_json(indent=1).encode())
    return survey
