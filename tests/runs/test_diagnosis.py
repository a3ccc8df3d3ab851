"""Methods that do not learn are found by their first step, and no method of the package is accused."""

import pytest

from fedvl.data.sources import Opener
from fedvl.display import Silent
from fedvl.methods import method_names, register
from fedvl.methods.linear import Linear
from fedvl.methods.roles import Private
from fedvl.runs.diagnosis import first_step_faults
from fedvl.runs.experiment import complete, local_engine
from fedvl.runs.folder import RunFolder
from fedvl.runs.method_checks import SMALL
from fedvl.runs.preparation import prepare
from fedvl.runs.settings import resolve_experiment

OPENER = Opener.once()
DOMAINS = ("faa-clip", "facmic", "fedka", "fedavg-nn", "fedprox-nn")  # whose papers leave a domain out


class Detached(Linear):
    def loss(self, tensors, batch):
        return super().loss(tensors, batch).detach() + 0 * tensors["weight"].sum()


class Unconnected(Linear):
    def loss(self, tensors, batch):
        return super().loss(tensors, batch).detach()


class Forgotten(Linear):
    """A private head whose role was forgotten, beside a trained shared one."""

    def join(self, samples, generator):
        return {"own": self.task.text_features.clone()}

    def predict(self, tensors, inputs):
        return super().predict(tensors, inputs) + inputs["features"] @ tensors["own"].mT


class Meant(Forgotten):
    def roles(self):
        return {"own": Private(), **super().roles()}


class Trained(Forgotten):
    def roles(self):
        return {"own": Private(trained=True), **super().roles()}


def faults(name):
    of_domains = {"data": {**SMALL["data"], "test_shots": 10}} if name in DOMAINS else {}
    preset = "embedded" if name in DOMAINS else "paper"
    settings = {"method": {"name": name, "preset": preset}, **SMALL, **of_domains}
    prepared = prepare(resolve_experiment(settings), Silent(), OPENER)
    return first_step_faults(prepared.method, local_engine(prepared))


@pytest.mark.parametrize("method", [Detached, Unconnected])
def test_a_loss_without_a_gradient_is_found(method):
    (fault,) = faults(register(method))
    assert fault.startswith("The gradient of the loss is 0 for every trained tensor ('")
    assert "'weight'" in fault
    assert fault.endswith("without detach.")


def test_a_private_tensor_that_nothing_trains_is_found_unless_its_role_says_so():
    (fault,) = faults(register(Forgotten))
    assert fault.startswith(
        "'own' takes part in the loss, but nothing trains it: give it the role Private(trained=True)"
    )
    assert faults(register(Meant)) == []
    assert faults(register(Trained)) == []


@pytest.mark.parametrize("name", method_names())
def test_no_method_of_the_package_has_such_a_fault(name):
    assert faults(name) == []


def test_a_run_of_ones_own_method_says_so_at_its_end(tmp_path):
    experiment = resolve_experiment({"method": {"name": register(Detached)}, **SMALL})
    with RunFolder.create(tmp_path / "run", experiment) as folder:
        result = complete(folder, Silent(), OPENER)
    assert any(note.startswith("The gradient of the loss is 0") for note in result.notes)
