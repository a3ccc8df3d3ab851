"""A finished run at a client: its shared and private tensors, tested on its own images."""

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from fedvl.deployment.audit_log import own_rounds
from fedvl.deployment.messages import Header
from fedvl.deployment.party import Party
from fedvl.federation.privacy import spent_on
from fedvl.federation.round import Federation
from fedvl.report.page import write_report
from fedvl.report.reading import images_tested
from fedvl.report.tables import sure
from fedvl.runs.contents import Examples, Figures
from fedvl.runs.evaluation import evaluate_test
from fedvl.runs.experiment import make_judge
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared
from fedvl.runs.result import describe

OWN_IMAGES = "this client's own test images"


def finish_run(
    folder: Path,
    name: str,
    prepared: Prepared,
    party: Party,
    last: Header,
    data: str | None,
    say: Callable[[str], None],
) -> None:
    """Write model, result and report of a run; ``last``: the server's last request."""
    shared = party.finished
    assert shared is not None, "the server has sent the final tensors"
    run = RunFolder(party.folder)
    run.describe(prepared.experiment)
    tensors = {**shared, **party.engine.private_of(party.number)}
    judge = make_judge(prepared, party.engine)
    began = time.perf_counter()
    judged = [(judge.judge(tensors, {}), time.perf_counter() - began)] if len(judge.test) else []
    records = own_rounds(folder, last.run, party.number, last.round)
    experiment = prepared.experiment
    federation = Federation(prepared.method, party.engine, experiment.federation, experiment.seed, shared, records)
    result = describe(prepared, federation, judge, judge.judge_zero_shot() if judged else None, judged)
    if party.spent:
        spent = party.spent[-1]
        result = result.joined(Figures(privacy=spent.model_copy(update={"of": spent_on(experiment)})))
        owner = "This client has" if spent.unit == "client" else "This client's images have"
        say(f"{owner} spent epsilon {spent.epsilon:.2f} (delta {spent.delta:g}).")
    option = ["--data", data] if data else []
    of_client = Figures(
        rounds=last.round,
        partition=None,  # what the others hold is not known here
        partition_counts=[prepared.training.counts[party.number].tolist()],
        party=name,
        command=shlex.join(["fedvl", "client", str(folder), *option]),
    )
    run.write_rounds(records)
    if judged:
        evaluate_test(run, result, judge, None, (tensors, {}), OWN_IMAGES)
    run.finish(result.joined(of_client), Examples(), tensors, {})
    write_report(run.path)
    say(f"The run is over; the model, with what is this client's own, is in {run.path}.")
    if judged:
        images = images_tested(result)
        before, after = (sure(value, images) for value in (result.zero_shot_accuracy, result.accuracy))
        say(f"Accuracy on this client's own {images:,} test images: {after}; zero-shot: {before}.")
    say(f"Ask the model with fedvl predict {folder} IMAGES; fedvl serve, export and report take {folder} too.")
