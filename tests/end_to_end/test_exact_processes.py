"""Ridge between real processes under secure aggregation: one left, one added images, and all figures are those of one process."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from PIL import Image

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.kills import draw_images
from helpers.machines import LATEST, clients_at_work, ended, make_federation, start_server

from fedvl.config import Experiment
from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.membership import approve_experiment
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.runs.contributions import plan_of
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.tensors import load

NAMES = ["east", "north", "south", "west"]
LEAVES, ADDS = 3, 1
FEDERATION = {"threads": 1, "deadline": 120, "secure_sum": True}


def resolve(images, more=None) -> Experiment:
    """The experiment of all clients, or that without one of them and with the images that another added."""
    data: dict[str, Any] = {"dataset": str(images), "partition": "iid"}
    federation: dict[str, Any] = dict(FEDERATION)
    if more is not None:
        data["additions"], federation["withdrawn"] = [f"{ADDS}={more}"], [LEAVES]
    settings = {"method": {"name": "ridge"}, "device": "cpu", "data": data, "federation": federation}
    return resolve_for_parties(settings, len(NAMES))


def draw_more(folder):
    """Images of a known class and of a new one."""
    draw = np.random.default_rng(1)
    for part, name in ((part, name) for part in ("train", "test") for name in ("a", "teapot")):
        place = folder / part / name
        place.mkdir(parents=True)
        for number in range(3):
            Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return folder


def agree(folder, name, experiment):
    """Put an experiment of this name before the server and every client, who approve of it."""
    for place in (folder, *(folder / "parties" / party for party in NAMES)):
        (place / "experiments" / f"{name}.toml").write_bytes(experiment.to_toml().encode())
    for party in NAMES:
        approve_experiment(folder / "parties" / party, experiment)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_client_that_left_and_images_that_came_give_the_figures_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    images, more = draw_images(tmp_path), draw_more(tmp_path / "more")
    experiments = {"ridge": resolve(images), "after": resolve(images, more)}
    folder = make_federation(tmp_path / "clinic", {name: [experiments["ridge"]] for name in NAMES})
    agree(folder, "after", experiments["after"])
    with clients_at_work(folder, NAMES) as place:
        servers = {name: start_server(place, name, tmp_path / name) for name in experiments}
        with ended(list(servers.values())):
            for name, server in servers.items():
                assert server.wait(LATEST) == 0, (tmp_path / f"{name}.log").read_text()
    for name, experiment in experiments.items():
        run = RunFolder(tmp_path / name)
        alone = RunFolder(tmp_path / f"{name}-alone")
        alone.path.mkdir()
        alone.describe(experiment)
        complete(alone, Silent())
        assert run.result.accuracy == alone.result.accuracy
        ours, theirs = (load(each.file("model.safetensors")) for each in (run, alone))
        assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < 1e-6
        with pytest.raises(FedVLError, match="no sums of single clients"):
            plan_of(run, None)
        assert run.rounds[0].cohort == ([0, 1, 2] if name == "after" else [0, 1, 2, 3])
    assert RunFolder(tmp_path / "after").result.class_names[-1] == "teapot"
