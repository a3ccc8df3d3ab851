"""A party's own policy: each line, read before each answer, in words that say which line and what to do."""

import math
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import EXPERIMENT, NO_WATCH, SmallClient
from helpers.small import small_method

from fedvl.config import PrivacyConfig
from fedvl.deployment import client as client_module
from fedvl.deployment.audit_log import read_log
from fedvl.deployment.files import experiment_id, resolve_for_parties
from fedvl.deployment.membership import create, make_join_request
from fedvl.deployment.policy import (
    POLICY_FILE,
    TEMPLATE,
    Policy,
    identify,
    read_policy,
    refuse_downloads,
    sent_by,
    write_policy,
)
from fedvl.errors import FedVLError
from fedvl.federation.accounting import Account, Step, epsilon_of
from fedvl.models.checkpoint import load_model
from fedvl.runs.settings import resolve_experiment


def written(folder, text):
    (folder / POLICY_FILE).write_text(text)
    return read_policy(folder)


def test_the_file_to_begin_with_says_the_defaults_in_every_line(tmp_path):
    assert write_policy(tmp_path)
    assert read_policy(tmp_path) == Policy()
    assert not write_policy(tmp_path)  # never over one that is there
    uncommented = TEMPLATE.replace("# epsilon", "epsilon").replace("# delta", "delta")
    assert written(tmp_path, uncommented) == Policy(epsilon=8.0)
    lines = [line.split(" = ")[0] for line in uncommented.splitlines() if " = " in line]
    assert lines == list(Policy.model_fields)


@pytest.mark.parametrize(
    "text, says",
    [
        ("least_client = 3", "There is no setting 'least_client'; did you mean 'least_clients'?"),
        ("least_clients = 0", "'least_clients' is 0, but it must be greater than or equal to 1"),
        ("least_clients = 'many'", "'least_clients' is 'many'"),
        ("hours = '8 to 18'", "'hours' is '8 to 18', but it should be two times of day, such as 08:00-18:00"),
        ("hours = '08:00-25:00'", "two times of day"),
        ("epsilon = inf", "'epsilon' is inf"),
        ("epsilon = 0", "greater than 0"),
        ("methods = linear", "not valid TOML"),
    ],
)
def test_a_policy_that_is_none_is_explained_in_a_sentence(text, says, tmp_path):
    with pytest.raises(FedVLError) as error:
        written(tmp_path, text)
    assert says in str(error.value)
    assert POLICY_FILE in str(error.value)


def test_without_a_policy_nothing_is_answered(tmp_path):
    with pytest.raises(FedVLError, match=r"There is no .*policy\.toml; fedvl federation approve .* writes one"):
        read_policy(tmp_path)


@pytest.mark.parametrize("text", ["", "single_statistics = true"])
def test_statistics_leave_by_themselves_only_if_the_policy_says_so(text, tmp_path):
    policy, method = written(tmp_path, text), small_method("ridge")

    def check(**settings):
        policy.check_experiment(resolve_experiment({"method": {"name": "ridge"}, **settings}), method, 100)

    check(federation={"secure_sum": True})
    check(privacy={"unit": "record", "epsilon": 3.0})
    for hidden_by_the_server_alone in ({}, {"privacy": {"unit": "client", "epsilon": 3.0}}):
        if text:
            check(**hidden_by_the_server_alone)
        else:
            with pytest.raises(FedVLError, match=r"The line single_statistics of .* agree on a run with --secure-sum"):
                check(**hidden_by_the_server_alone)
    assert sent_by(method, 0) == [("gram", "sent"), ("cross", "sent"), ("counts", "sent")]


def at(hour, minute=0):
    return datetime(2026, 1, 1, hour, minute)


@pytest.mark.parametrize(
    "hours, inside, outside",
    [
        ("08:00-18:00", [(8, 0), (17, 59)], [(7, 59), (18, 0), (0, 0)]),
        ("22:00-06:00", [(22, 0), (23, 59), (0, 0), (5, 59)], [(6, 0), (21, 59), (12, 0)]),
        ("00:00-24:00", [(0, 0), (12, 0), (23, 59)], []),
        ("18:00-24:00", [(18, 0), (23, 59)], [(0, 0), (17, 59)]),
    ],
)
def test_hours_of_the_day_also_over_night(hours, inside, outside):
    policy = Policy(hours=hours)
    for moment in inside:
        policy.check_time(at(*moment))
    for moment in outside:
        with pytest.raises(FedVLError, match=f"The line hours of .* is {hours}, and it is"):
            policy.check_time(at(*moment))


def test_the_ceiling_is_of_all_steps_of_all_runs_together():
    step, other = Step(0.1, 2.0), Step(1.0, 20.0)
    told = [{"rate": 0.1, "sigma": 2.0, "steps": 30}, {"rate": 1.0, "sigma": 20.0, "steps": 4}]
    entries = [{"unit": "record", **entry} for entry in told]
    together = epsilon_of({step: 40, other: 4}, 1e-6)
    assert together > epsilon_of({step: 30, other: 4}, 1e-6)
    Policy(epsilon=together, delta=1e-6).check_budget(entries, "record", step, 10)
    with pytest.raises(FedVLError, match=r"The line epsilon of .* sum over all runs"):
        Policy(epsilon=together * 0.999, delta=1e-6).check_budget(entries, "record", step, 10)
    Policy().check_budget(entries, "record", step, 10**6)  # no ceiling


def test_a_client_level_round_counts_for_the_client_and_at_half_the_noise_for_each_image():
    """One image more or less can turn a clipped update around: it moves by 2 x clip, where a client moves by clip.

    Gaussian mechanisms of noise sigma and sensitivity s are one of sensitivity s / sigma: 4 rounds of sigma 8 are mu = 1/4
    for the client and 1/2 for an image, and 3 record steps of sigma 6 add 3 / 36 to the square of that.
    """
    rounds = [{"unit": "client", "rate": 1.0, "sigma": 8.0, "steps": 1}] * 3
    client = gaussian_epsilon(0.25, 1e-5)
    Policy(epsilon=client + 0.02, delta=1e-5).check_budget(rounds, "client", Step(1.0, 8.0), 1)
    with pytest.raises(FedVLError, match=r"The line epsilon of .* for each client"):
        Policy(epsilon=client - 0.02, delta=1e-5).check_budget(rounds, "client", Step(1.0, 8.0), 1)
    steps = [{"unit": "record", "rate": 1.0, "sigma": 6.0, "steps": 3}]
    image = gaussian_epsilon(math.sqrt(4 * (2 / 8) ** 2 + 3 / 36), 1e-5)
    assert image > 2 * client
    for spent, unit, step, count in (
        ([*rounds, *steps], "client", Step(1.0, 8.0), 1),
        ([*rounds, rounds[0]], "record", Step(1.0, 6.0), 3),
    ):
        Policy(epsilon=image + 0.02, delta=1e-5).check_budget(spent, unit, step, count)
        with pytest.raises(FedVLError, match=r"The line epsilon of .* for each record"):
            Policy(epsilon=image - 0.02, delta=1e-5).check_budget(spent, unit, step, count)


def test_discrete_noise_is_counted_by_renyi_divergences_which_bound_gaussian_noise_too():
    """Privacy loss distributions are of Gaussian noise alone; one report with counts makes all be counted so."""
    told = {"unit": "client", "rate": 1.0, "sigma": 8.0, "steps": 3}
    step = Step(1.0, 8.0)
    tight, loose = epsilon_of({step: 4}, 1e-5, "pld"), epsilon_of({step: 4}, 1e-5, "rdp")
    assert tight < 0.95 * loose
    cases: list[tuple[Account, Account]] = [("rdp", "pld"), ("pld", "rdp")]
    for before, now in cases:
        spent = [{**told, "account": before}]
        Policy(epsilon=loose * 1.001, delta=1e-5).check_budget(spent, "client", step, 1, now)
        with pytest.raises(FedVLError, match="The line epsilon"):
            Policy(epsilon=loose * 0.999, delta=1e-5).check_budget(spent, "client", step, 1, now)


def gaussian_epsilon(mu, delta):
    """The epsilon of a Gaussian mechanism of sensitivity mu and noise 1, by Balle and Wang (2018), theorem 8."""

    def deltas(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)

    return brentq(lambda epsilon: deltas(epsilon) - delta, 1e-6, 20)


def test_what_leaves_is_named_by_the_contracts_kinds():
    assert sent_by(small_method("linear"), 0) == [("weight", "shared"), ("bias", "shared")]
    assert ("counts", "report") in sent_by(small_method("fedpp"), 0)
    assert "sent" in {kind for _, kind in sent_by(small_method("fed-mp"), 0)}


def test_an_experiment_is_identified_by_its_settings_and_its_models_weights():
    experiment, encoder = resolve_experiment({}), load_model("fedvl-tiny", "cpu")
    assert identify(experiment) == experiment_id(experiment, encoder)
    assert identify(experiment) != identify(experiment.model_copy(update={"seed": 1}))


# --- each line at a client

RECORD = PrivacyConfig(unit="record", epsilon=3.0, clip=1.0)
SECURE = {"secure_sum": True, "least_clients": 2}
LINES = {
    "methods": ("linear", {}, 'methods = ["cachefl"]', 'methods = ["cachefl", "linear"]'),
    "leaves": ("linear", {}, 'leaves = ["report"]', 'leaves = ["weight", "b*"]'),
    "least_clients": ("linear", {}, "least_clients = 2", "least_clients = 1"),
    "least_images": ("linear", {}, "least_images = 13", "least_images = 12"),
    "most_rounds": ("linear", {"rounds": 3}, "most_rounds = 2", "most_rounds = 3"),
    "hours": ("linear", {}, 'hours = "13:00-11:00"', 'hours = "11:00-13:00"'),
    "epsilon": ("linear", {}, "epsilon = 100.0", ""),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_refuses_before_anything_is_prepared_and_can_be_changed_while_the_client_runs(
    line, tmp_path, monkeypatch
):
    name, settings, forbids, allows = LINES[line]
    monkeypatch.setattr(client_module, "datetime", type("Noon", (), {"now": staticmethod(lambda: at(12))}))
    client = SmallClient.joined(3, tmp_path, name, **settings)
    (client.state / POLICY_FILE).write_text(forbids)
    reply = client.ask()
    problem = reply.header.problem
    assert problem.startswith(f"The line {line} of this party's policy.toml ")
    assert reply.payload == b""
    assert reply.header.weight == 0
    assert not (client.state / "runs").exists()
    assert client.said == [f"Refused: {problem}"]
    assert "12" not in problem.replace("12:00", "").replace("least_images is 13", "")  # how many images it has
    (client.state / POLICY_FILE).write_text(allows)
    assert client.problem() == ""
    kinds = [entry["kind"] for entry in entries(client)]
    assert kinds == ["approved", "received", "refused", "received", "policy", "begun", "secret", "sent"]


def entries(client):
    return read_log(client.log.path).chain.entries


def test_the_log_of_a_client_holds_what_it_got_and_sent_and_nothing_private(tmp_path):
    client = SmallClient.joined(3, tmp_path, privacy=RECORD)
    reply = client.ask()
    sent = entries(client)[-1]
    assert sent["kind"] == "sent"
    assert (sent["run"], sent["round"], sent["message"], sent["bytes"]) == ("a" * 32, 1, "train", len(reply.payload))
    assert reply.header.log == client.log.head
    budget = next(entry for entry in entries(client) if entry["kind"] == "budget")
    assert 0 < budget["epsilon"] < 3
    allowed = {"time", "kind", "salt", "before", "run", "round", "message", "client", "bytes", "sha256", "head"}
    allowed |= {"attempt", "roster", "file", "of", "account"}
    allowed |= {"experiment", "draws", "unit", "epsilon", "delta", "sampling", "planned", "rate", "sigma", "steps"}
    assert {name for entry in entries(client) for name in entry} <= allowed


@pytest.mark.parametrize("kind", ["report", "train"])
def test_a_report_of_counts_spends_too_and_is_refused_like_an_update(kind, tmp_path):
    options = {"counts": "shares", "interval": 1}
    private = PrivacyConfig(unit="client", epsilon=3.0, clip=0.05)
    client = SmallClient.joined(3, tmp_path, "fedpp", privacy=private, options=options, **SECURE)
    (client.state / POLICY_FILE).write_text("epsilon = 0.1")
    assert "is 0.1, and this round would take the sum over all runs to" in client.problem(kind=kind)


def test_a_client_connects_only_if_it_may_answer_something(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "check_key", lambda folder: None)
    monkeypatch.setattr(client_module, "Supervised", lambda *words: pytest.fail("it connects"))
    client = SmallClient(3, tmp_path, experiments=(EXPERIMENT, "d" * 64))
    client.state.mkdir()
    write_policy(client.state)
    with pytest.raises(FedVLError, match="has not approved the experiment bbbbbbbbbbbb"):
        client.serve(NO_WATCH, stay=False)


@pytest.mark.parametrize(
    "least, says", [(2, ""), (4, "A sum of 3 clients is too few; this client takes part in sums of 4")]
)
def test_the_fewest_clients_of_a_sum_are_the_partys_own_to_say(least, says, tmp_path):
    from fedvl.deployment.messages import pack_tensors, unpack_tensors
    from fedvl.deployment.secure_sum import ROSTER

    clients = [SmallClient.joined(number, tmp_path / str(number), **SECURE) for number in (0, 3, 4)]
    for client in clients:
        (client.state / POLICY_FILE).write_text(f"least_clients = {least}\nleast_images = 5")
    entries = [unpack_tensors(client.ask(pack_tensors({}), kind="keys").payload, 2**20)[ROSTER] for client in clients]
    roster = b"[" + b",".join(bytes(entry.tolist())[1:-1] for entry in entries) + b"]"
    payload = pack_tensors({ROSTER: torch.frombuffer(bytearray(roster), dtype=torch.uint8)})
    reply = clients[1].ask(payload, kind="share_train", sum_attempt=1)
    assert reply.header.problem.startswith(says)
    assert bool(reply.header.problem) == bool(says)
    assert bool(reply.payload) != bool(says)


# --- downloads

COMMANDS = """
import sys
from typer.testing import CliRunner
from fedvl.cli import app
from fedvl.models.checkpoint import load_model

for folder in sys.argv[2:]:
    for words in (["federation", "approve", folder, "--yes"], ["client", folder, "--dry-run"], ["client", folder]):
        done = CliRunner().invoke(app, words)
        print(words[0], folder, done.exception, flush=True)
print("control", flush=True)
try:
    load_model(sys.argv[1])
except Exception as error:
    print(type(error).__name__)
"""


class Hub:
    """What listens in place of the hub, and counts who comes."""

    def __enter__(self):
        self.visits = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.answer, daemon=True).start()
        return self

    def __exit__(self, *ignored):
        self.listener.close()

    def answer(self):
        with suppress(OSError):  # until it is closed
            while True:
                connection, _ = self.listener.accept()
                self.visits += 1
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


HUB_EXPERIMENTS: dict[str, dict[str, Any]] = {
    "model": {"model": {"name": "evil/model"}},
    "dataset": {"data": {"dataset": "cifar10-mini+hf:evil/data"}},
    "painter": {"method": {"name": "cachefl", "synthetic": "diffusers:evil/painter"}},
}


def test_a_received_folder_contacts_no_hub(tmp_path):
    """With a listener as the hub: approve, the dry run and the client say what is not here, and connect nowhere."""
    clinic = tmp_path / "clinic"
    create(
        clinic, list(HUB_EXPERIMENTS), "fed.example.org", 9443, resolve_for_parties({"method": {"name": "linear"}}, 3)
    )
    parties = [clinic / "parties" / name for name in HUB_EXPERIMENTS]
    for party, settings in zip(parties, HUB_EXPERIMENTS.values(), strict=True):
        (party / "experiments" / "linear.toml").write_text(resolve_experiment(settings).to_toml())
        make_join_request(party)
    with Hub() as hub:
        words = [sys.executable, "-c", COMMANDS, "evil/model", *map(str, parties)]
        endpoint = f"http://127.0.0.1:{hub.listener.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        said, visits = [], 0
        for line in process.stdout:
            if line == "control\n":
                visits = hub.visits
            said.append(line)
        assert process.wait() == 0
        assert visits == 0
        assert hub.visits > 0  # the control: a model that a user names is asked for
    model, dataset, painter = said[:3], said[3:6], said[6:9]
    assert all("names the model evil/model of the hub, which is not on this machine" in line for line in model)
    assert all("hf download evil/model." in line for line in model)
    assert all("generates images with diffusers:evil/painter" in line for line in painter)
    assert "None" in dataset[0]  # to approve, nobody opens it
    for line in dataset[1:]:
        assert "names the dataset hf:evil/data of the hub" in line
        assert "run hf download evil/data --repo-type dataset." in line


def test_what_is_on_this_machine_is_no_download(monkeypatch, tmp_path):
    monkeypatch.setattr("fedvl.models.checkpoint.stored", lambda name: tmp_path)
    monkeypatch.setattr("fedvl.data.fetch.downloaded", lambda name: tmp_path)
    for name in ("model", "dataset"):
        refuse_downloads(name, resolve_experiment(HUB_EXPERIMENTS[name]), dataset=True)
    painter = {"method": {"name": "cachefl", "synthetic": f"diffusers:{tmp_path}"}}
    refuse_downloads("painter", resolve_experiment(painter), dataset=True)


def test_surveys_are_limited_over_all_runs_and_have_no_noise():
    plain = resolve_experiment({"method": {"name": "linear"}})
    private = resolve_experiment({"method": {"name": "linear"}, "privacy": {"unit": "record"}})
    Policy().check_survey(plain, 0)
    with pytest.raises(FedVLError, match=r"The line surveys .* is 1, and 1 were answered"):
        Policy().check_survey(plain, 1)
    Policy(surveys=2).check_survey(plain, 1)
    with pytest.raises(FedVLError, match=r"The line surveys .* is 0"):
        Policy(surveys=0).check_survey(plain, 0)
    for policy, experiment in ((Policy(), private), (Policy(epsilon=3.0), plain)):
        with pytest.raises(FedVLError, match="The counts of a survey have no noise"):
            policy.check_survey(experiment, 0)
