"""Servers that lie to real clients in secure sums: refused with an error, and their whole view has nothing of one client."""

import json
import sys
from importlib.util import find_spec

import pytest
import torch

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.forker import Forked
from helpers.kills import draw_images
from helpers.machines import LATEST, clients_at_work, ended, make_federation

from fedvl.deployment.files import resolve_for_parties
from fedvl.display import Silent
from fedvl.federation.fixed_point import encode_update
from fedvl.runs.experiment import local_engine
from fedvl.runs.preparation import prepare
from fedvl.seeding import torch_generator
from fedvl.tensors import load

NAMES = ["a", "b", "c", "d", "e"]
VICTIM = 1
FEDERATION = {"threads": 1, "chunk": 1, "deadline": 30, "secure_sum": True, "rounds": 2, "attempts": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("lies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVL_CACHE", str(root / "cache"))
        data = {"dataset": str(draw_images(root, each=20)), "partition": "iid"}
        settings = {"device": "cpu", "data": data, "training": {"local_epochs": 1}, "method": {"name": "linear"}}
        experiment = resolve_for_parties({**settings, "federation": FEDERATION}, len(NAMES))
        folder = make_federation(root / "clinic", {name: [experiment] for name in NAMES})
        with clients_at_work(folder, NAMES) as place:
            place.experiment = experiment
            yield place


def lie(place, kind, run):
    """Run a lying server; return its exit code, what it said, and all tensors that it saw."""
    view = run.with_suffix(".view")
    words = [sys.executable, "-m", "helpers.lying_server", kind, str(VICTIM), str(view)]
    words += ["server", str(place.folder), "--out", str(run), "--quiet"]
    with open(run.with_suffix(".log"), "wb") as log:
        server = Forked(words, log)
        with ended([server]):
            code = server.wait(LATEST)
    return code, run.with_suffix(".log").read_text(), [load(path) for path in sorted(view.glob("*.safetensors"))]


def numbers_of(place, client):
    """What a client adds to the sum of the first round."""
    prepared = prepare(place.experiment, Silent())
    engine = local_engine(prepared)
    shared = prepared.method.start(torch_generator(place.experiment.seed, "start"))
    [trained] = engine.train(0, [client], shared)
    return encode_update(trained.update.tensors, shared, trained.update.weight, trained.loss, len(NAMES))


def largest_cosine(view, numbers):
    """Search every tensor that the server saw, and the differences of any two, for a client's numbers."""
    wide = [t.double().flatten() for seen in view for t in seen.values() if t.numel() == len(numbers)]
    assert wide
    pairs = [one - other for place, one in enumerate(wide) for other in wide[:place]]
    found = [float(torch.cosine_similarity(numbers.double(), seen, dim=0)) for seen in [*wide, *pairs]]
    return max(map(abs, found))


def refusals(place):
    return [
        entry["reason"]
        for name in NAMES
        for log in [*(place.folder / "parties" / name).rglob("audit.jsonl")]
        for entry in map(json.loads, log.read_text().splitlines())
        if entry["kind"] == "refused"
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["lists", "models"])
def test_a_lying_server_opens_nothing_and_is_refused_with_an_error(kind, place, tmp_path):
    before = len(refusals(place))
    code, said, view = lie(place, kind, tmp_path / kind)
    assert code == 2, said
    assert "necessary clients opened the sum of round 1" in said or "could not be used" in said
    refused = refusals(place)[before:]
    assert any("necessary clients signed this survivor list" in reason for reason in refused)
    for client in range(len(NAMES)):
        assert largest_cosine(view, numbers_of(place, client)) < 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_false_share_names_its_sender_and_the_run_ends_without_it(place, tmp_path):
    run = tmp_path / "cheat"
    code, said, view = lie(place, "cheat", run)
    assert code == 0, said
    records = [json.loads(path.read_bytes())["record"] for path in sorted(run.glob("journal/[0-9]*.json"))]
    assert [refusal["client"] for refusal in records[0]["refused"]] == [VICTIM]
    assert [record["dropped"] for record in records] == [[], [VICTIM]]
    assert largest_cosine([seen for seen in view if "total" not in seen], numbers_of(place, 0)) < 0.1
