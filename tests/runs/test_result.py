"""Figures of a finished run that its result has."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.runs import prepare

from fedvl.federation.records import Budget, Record
from fedvl.runs.experiment import local_engine
from fedvl.runs.result import privacy_figures

SPENT = Budget(unit="record", epsilon=2.0, delta=1e-5, sampling="by chance", planned=3)


@pytest.mark.parametrize("simulated", [True, False])
def test_a_budget_says_whether_its_noise_is_secret(simulated: bool) -> None:
    prepared = prepare({"data": {"clients": 2}, "privacy": {"unit": "record"}})
    engine: Any = local_engine(prepared) if simulated else SimpleNamespace()
    federation: Any = SimpleNamespace(engine=engine, privacy=engine, records=[Record(round=1, privacy=SPENT)])
    found = privacy_figures(prepared, federation)
    assert found is not None
    assert found.simulated == simulated
    assert (found.of, found.group, found.epsilon) == ("image", None, 2.0)
    assert ("class counts, names of images" in [item.name for item in found.released]) == simulated
    assert "planned" not in found.to_dict()
