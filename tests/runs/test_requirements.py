"""Settings that do not fit each other are refused in one sentence, with what to do."""

from typing import Any

import pytest
from helpers.small import small_task

from fedvl.config import MANY, Experiment
from fedvl.errors import FedVLError
from fedvl.methods.linear import Linear
from fedvl.runs.requirements import check_method, check_private_choice
from fedvl.runs.settings import resolve_experiment


def private(unit: str = "record", **data: Any) -> Experiment:
    return resolve_experiment({"privacy": {"unit": unit}, "data": data})


@pytest.mark.parametrize("data", [{"shots": 16}, {"long_tail": 10.0}])
def test_images_that_are_chosen_by_the_labels_of_others_are_refused_at_a_partys_own_data(data: dict[str, Any]) -> None:
    with pytest.raises(FedVLError, match=f"one image decides about others; use --set data.shots={MANY}"):
        check_private_choice(private(**data), simulated=False)
    check_private_choice(private(**data), simulated=True)  # drawn from a pool, before anything is a client's
    check_private_choice(private("client", **data), simulated=False)
    check_private_choice(private("none", **data), simulated=False)
    check_private_choice(private(shots=MANY), simulated=False)
    check_private_choice(private(missing="both:0.5"), simulated=False)


def test_shots_of_each_client_are_refused_in_simulation_too() -> None:
    for simulated in (True, False):
        with pytest.raises(FedVLError, match=r"data\.client_shots chooses among a client's images by their labels"):
            check_private_choice(private(client_shots=4), simulated)


class Plain(Linear):
    requires = {"optimiser": "sgd", "momentum": 0.0}


class Corrected(Linear):
    def correct(self, gradients: Any, tensors: Any, received: Any) -> Any:
        return gradients


def test_a_method_refuses_settings_of_training_for_which_it_was_not_derived() -> None:
    method = Plain(Plain.options_type(), small_task())
    for training, sentence in (
        ({"optimiser": "adam"}, "derived for training.optimiser=sgd, and it is adam; use --set training.optimiser=sgd"),
        ({"momentum": 0.5}, "derived for training.momentum=0.0, and it is 0.5; use --set training.momentum=0.0"),
    ):
        with pytest.raises(FedVLError, match=sentence):
            check_method(method, resolve_experiment({"training": training}))
    check_method(method, resolve_experiment({"training": {"momentum": 0.0, "weight_decay": 0.1}}))


def test_corrected_gradients_are_refused_where_those_of_single_images_are_clipped() -> None:
    method = Corrected(Corrected.options_type(), small_task())
    with pytest.raises(
        FedVLError, match="corrects gradients, and record-level privacy clips and hides those of the loss"
    ):
        check_method(method, resolve_experiment({"privacy": {"unit": "record"}}))
    check_method(method, resolve_experiment({"privacy": {"unit": "client"}}))
