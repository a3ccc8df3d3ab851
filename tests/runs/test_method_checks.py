"""Checks of a method: five methods of the package pass, and for each check a file that breaks it fails."""

import re
from pathlib import Path

import pytest
from helpers.runs import OPENER

from fedvl.errors import FedVLError
from fedvl.runs.method_checks import CHECKS, Check, examine_method

HEAD = """import torch
from fedvl.methods.base import Method
from fedvl.methods.roles import Private, Server, Shared, Statistic

class Mine(Method):
    def start(self, generator):
        return {"weight": self.task.text_features.clone()}

    def predict(self, tensors, inputs):
        return self.scale * inputs["features"] @ tensors["weight"].T
"""
MISSPELT = """
    def roles(self):
        return {"wieght": Shared(rate=2.0)}
"""
FORGOTTEN_ROLE = """
    def start(self, generator):
        return {"weight": self.task.text_features.clone(), "count": torch.zeros(())}
"""
TWO_OWNERS = """
    def join(self, samples, generator):
        return {"weight": torch.zeros(1, 1)}
"""
UNDECLARED_CHANGE = """
    def objective(self, tensors, batch):
        return self.loss(tensors, batch), {"weight": tensors["weight"]}
"""
ROWS_THAT_ARE_NONE = """
    def roles(self):
        return {"own": Private(per_sample=True)}

    def join(self, samples, generator):
        return {"own": torch.zeros(3)}
"""
UNUSED_MERGE = """
    def merge(self, shared, updates):
        return shared
"""
WRONG_SHAPE = """
    def predict(self, tensors, inputs):
        return (inputs["features"] @ tensors["weight"].T)[:, :2]
"""
LOG_OF_ZERO = """
    def loss(self, tensors, batch):
        return super().loss(tensors, batch) + torch.log(0 * tensors["weight"].square().sum())
"""
INFINITE_SCORES = """
    def predict(self, tensors, inputs):
        return inputs["features"] @ tensors["weight"].T / (0 if len(inputs["features"]) == 5 else 1)

    def loss(self, tensors, batch):
        return tensors["weight"].square().sum()
"""
COUNTS_ITS_CALLS = """
    calls = 0

    def predict(self, tensors, inputs):
        self.calls += 1
        return super().predict(tensors, inputs) + self.calls

    def loss(self, tensors, batch):
        return tensors["weight"].square().sum()
""".replace("super().predict(tensors, inputs)", "self.scale * inputs['features'] @ tensors['weight'].T")
WRITES_IN_PLACE = """
    def step(self, shared, mean):
        shared["weight"].add_(0.1)
        return mean
"""
DRAWS_BY_ITSELF = """
    def join(self, samples, generator):
        return {"own": torch.randn(3)}
"""
FORGETS_THE_MASK = """
    def loss(self, tensors, batch):
        return torch.nn.functional.cross_entropy(self.predict(tensors, batch.inputs), batch.labels)
"""
MOMENTUM_IN_AN_ATTRIBUTE = """
    velocity = 0.0

    def step(self, shared, mean):
        self.velocity = 0.5 * self.velocity + (mean["weight"] - shared["weight"])
        return {"weight": shared["weight"] + self.velocity}
"""
TINY_NUMBERS = """
    def roles(self):
        return {"weight": Shared(rate=1e-28)}

    def start(self, generator):
        return {"weight": 1e-14 * self.task.text_features}

    def predict(self, tensors, inputs):
        return self.scale * inputs["features"] @ (1e14 * tensors["weight"]).T
"""
MEANS = """
    exchanges = 1

    def roles(self):
        return {"sum": Statistic(tuple(self.task.text_features.shape))}

    def statistics(self, shared, samples):
        labels = torch.nn.functional.one_hot(samples.labels, len(self.task.class_names)).double()
        return {"sum": labels.T @ samples.inputs["features"].double() / DIVISOR}

    def solve(self, shared, sums):
        return {"weight": RESULT}
"""
SUMS = MEANS.replace("DIVISOR", "1").replace("RESULT", 'sums["sum"].float()')
BROKEN = {
    "wrong shape": (WRONG_SHAPE, "runs", "predict must return one row of 10 scores"),
    "misspelt role": (MISSPELT, "roles", "did you mean 'weight'"),
    "forgotten role": (FORGOTTEN_ROLE, "roles", "loss does not depend on 'count'; use trained=False"),
    "two owners": (TWO_OWNERS, "roles", "'weight' is shared and private"),
    "undeclared change": (UNDECLARED_CHANGE, "roles", "objective changes 'weight', and so do gradients"),
    "rows that are none": (ROWS_THAT_ARE_NONE, "roles", "'own' has 3 rows for 8 samples"),
    "unused merge": (UNUSED_MERGE, "roles", "merge is never called"),
    "logarithm of 0": (LOG_OF_ZERO, "finite values", "'its value' of loss of client 0 is not finite"),
    "infinite scores": (INFINITE_SCORES, "finite values", "'scores' of predict of client 0 is not finite"),
    "counts its calls": (COUNTS_ITS_CALLS, "purity", "predict gives different results"),
    "writes in place": (WRITES_IN_PLACE, "purity", "step modifies its arguments"),
    "draws by itself": (DRAWS_BY_ITSELF, "purity", "join gives different results"),
    "forgets the mask": (FORGETS_THE_MASK, "batched = one by one", "'shared weight' differs by .* batch.mask 0"),
    "momentum in an attribute": (MOMENTUM_IN_AN_ATTRIBUTE, "resume", "'shared weight' has other bits"),
    "tiny numbers": (TINY_NUMBERS, "secure aggregation", "'shared weight' differs from the plain mean"),
    "means for sums": (MEANS.replace("DIVISOR", "len(labels)").replace("RESULT", 'sums["sum"].float()'), "statistics",
                       "'sum' of two sets of samples is not the sum"),
}  # fmt: skip
UNSEEN = {"forgets the mask", "momentum in an attribute", "tiny numbers", "means for sums"}


def checked(name: str) -> dict[str, Check]:
    found = examine_method(name, OPENER)
    assert [check.name for check in found.checks] == list(CHECKS)
    assert found.passed == all(check.outcome != "fail" for check in found.checks)
    return {check.name: check for check in found.checks}


def outcomes(found: dict[str, Check]) -> dict[str, list[str]]:
    return {
        kind: [name for name, check in found.items() if check.outcome == kind] for kind in ("fail", "not applicable")
    }


@pytest.fixture
def written(tmp_path: Path):
    def write(body: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(HEAD + body, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize(("name", "without"), [
    ("linear", ["statistics"]),
    ("fst-cbdg", ["statistics"]),
    ("scaffold", ["statistics"]),
    ("ridge", ["batched = one by one"]),
    ("fed-em", ["batched = one by one"]),
    ("fed-mp", ["secure aggregation", "statistics"]),
    ("zero-shot", ["runs", "batched = one by one", "resume", "secure aggregation", "statistics"]),
])  # fmt: skip
def test_methods_of_the_package_pass(name: str, without: list[str]) -> None:
    found = checked(name)
    assert outcomes(found) == {"fail": [], "not applicable": without}
    if "secure aggregation" in without:
        reason = "Refused: Method 'fed-mp' needs perturbed_texts" if name == "fed-mp" else "The method trains nothing."
        assert found["secure aggregation"].detail.startswith(reason)


def test_fedpp_passes_with_labels_that_the_server_settles(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"  # without visual prompts, for which every step passes images through the tower
    path.write_text(
        "from fedvl.methods.fedpp import FedPP, FedPPOptions\n\n"
        "class MineOptions(FedPPOptions):\n    visual_prompts: bool = False\n\n"
        "class Mine(FedPP):\n    options: MineOptions\n",
        encoding="utf-8",
    )
    assert outcomes(checked(str(path))) == {"fail": [], "not applicable": ["statistics"]}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_method_fails_its_check_and_is_told_why(case: str, written) -> None:
    body, check, message = BROKEN[case]
    found = checked(written(body))
    assert found[check].outcome == "fail"
    assert re.search(message, found[check].detail)
    if case in UNSEEN:  # by the engine
        assert found["runs"].outcome == "pass"
    if case == "wrong shape":  # where it does not run nothing is said of runs
        after = ["batched = one by one", "resume", "secure aggregation", "statistics"]
        assert outcomes(found)["not applicable"] == after
        assert found["resume"].detail == "The method does not run; repair that first."


@pytest.mark.parametrize("body", ["", SUMS])
def test_a_sound_file_passes(body: str, written) -> None:
    assert outcomes(checked(written(body)))["fail"] == []


def test_a_file_that_is_no_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedVLError, match="There is no method file"):
        examine_method(str(tmp_path / "absent.py"), OPENER)
