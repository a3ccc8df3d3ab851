"""Settings that do not fit each other are refused in one sentence, with what to do."""

from typing import Any

import pytest

from fedvl.config import MANY, Experiment
from fedvl.errors import FedVLError
from fedvl.runs.requirements import check_private_choice
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
