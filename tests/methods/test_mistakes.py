"""A mistake in a method of the user's own is told with its line and the rule that it breaks, and no word of the engine's."""

import re
import textwrap
from pathlib import Path

import pytest
from helpers.runs import OPENER

from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment

START = "return {'weight': self.task.text_features.clone()}"
PREDICT = "return self.scale * inputs['features'] @ tensors['weight'].T"
LOSS = "return super().loss(tensors, batch)"


def method(start: str = START, predict: str = PREDICT, loss: str = LOSS) -> str:
    """A method's file with these bodies."""
    head = "import torch\nfrom fedvl.methods.base import Method\n\n\nclass Mine(Method):\n"
    hooks = {
        "start(self, generator)": start,
        "predict(self, tensors, inputs)": predict,
        "loss(self, tensors, batch)": loss,
    }
    return head + "".join(f"    def {name}:\n{textwrap.indent(body, ' ' * 8)}\n\n" for name, body in hooks.items())


RULE_1, RULE_3 = "breaks rule 1 (write", "breaks rule 3 (take random numbers"
RULE_2 = (
    "breaks rule 2 (do not branch on the value of a tensor): none can be read out; use torch.where and the like, and to look at "
    "values while debugging, run with --one-by-one."
)
SECOND = f"loss = super().loss(tensors, batch)\n{{}}\n{LOSS}"
# What the author wrote, its line as the sentence shows it (none: a hook returns what it must not), and what is said of it.
MISTAKES = {
    "adds in place": (method(predict=f"tensors['weight'] += 0.1\n{PREDICT}"), "tensors['weight'] += 0.1", RULE_1),
    "fills a buffer": (
        method(loss=f"total = torch.zeros(10, 256)\ntotal += tensors['weight']\n{LOSS}"),
        "total += tensors['weight']",
        RULE_1,
    ),
    "branches": (method(loss=SECOND.format("if loss > 1:\n    loss = 2 * loss")), "if loss > 1:", RULE_2),
    "loops until": (method(loss=SECOND.format("while loss > 1:\n    loss = loss / 2")), "while loss > 1:", RULE_2),
    "reads a value": (method(loss=SECOND.format("scale = loss.item()")), "scale = loss.item()", RULE_2),
    "leaves torch": (method(loss=SECOND.format("loss.detach().numpy()")), "loss.detach().numpy()", RULE_2),
    "draws": (method(loss=SECOND.format("torch.randn(3) * loss")), "torch.randn(3) * loss", RULE_3),
    "drops out": (
        method(predict=PREDICT.replace("inputs['features']", "torch.dropout(inputs['features'], 0.1, True)")),
        "torch.dropout(inputs['features'], 0.1, True)",
        RULE_3,
    ),
    "misnames an input": (method(predict="return inputs['feature']"), "inputs['feature']", "KeyError: 'feature'"),
    "forgets to transpose": (method(predict=PREDICT.removesuffix(".T")), "tensors['weight']`", "RuntimeError: "),
    "misspells a name": (method(loss="return los"), "return los", "NameError: name 'los' is not defined"),
    "returns a list": (method(start="return [torch.zeros(2)]"), "", "start must return a dictionary .* returns a list"),
    "returns nothing": (method(predict="inputs['features']"), "", "predict must return one row of 10 .* returns nothing"),
    "scores features": (method(predict="return inputs['features']"), "", r"returns a tensor of shape \(2, 256\)"),
    "loses the gradient": (method(predict=PREDICT.replace("T", "T.detach()")), "", "loss must return one number that"),
    "loss of each row": (method(loss="return batch.mask * tensors['weight'].sum()"), "", "loss must return one number"),
    "starts with integers": (
        method(start=START.replace("}", ", 'count': torch.zeros(3, dtype=torch.long)}")),
        "",
        r"'count' as torch.int64, which needs the role Shared\(trained=False\)",
    ),
    "predicts nothing": ("from fedvl.methods.base import Method\nclass A(Method):\n    def start(self, generator):\n        "
    + START, "", "A defines no predict"),
}  # fmt: skip


MISNAMED = {
    "a hook": (
        method() + "    def losss(self, tensors, batch):\n        return 2 * super().loss(tensors, batch)\n",
        "mine.py has losss, which is no hook and is called nowhere; did you mean loss?",
    ),
    "a role": (
        "from fedvl.methods.roles import Shared\n"
        + method()
        + "    def roles(self):\n        return {'wieght': Shared(rate=10.0)}\n",
        "mine.py gives 'wieght' a role, but there is no such tensor; did you mean 'weight'?",
    ),
    "a kind of role": (
        method() + "    def roles(self):\n        return {'weight': 'shared'}\n",
        "Mine.roles says 'shared' of 'weight'; say Shared(...)",
    ),
    "an argument": (
        method().replace("predict(self, tensors, inputs)", "predict(self, inputs)"),
        "mine.py cannot be loaded: TypeError: Mine.predict must take the arguments of predict(self, tensors, inputs)",
    ),
}


@pytest.mark.parametrize("kind", MISNAMED)
def test_a_name_that_would_be_passed_over_is_told(kind: str, tmp_path: Path) -> None:
    code, said = MISNAMED[kind]
    with pytest.raises(FedVLError, match=re.escape(said)):
        run_of(code, tmp_path)


def test_helpers_and_roles_of_tensors_that_are_there_only_at_times_are_left_alone(tmp_path: Path) -> None:
    helper = "    def losses(self):\n        return 1\n\n    def notes(self):\n        return [str(self.losses())]\n\n"
    roles = "    def roles(self):\n        return {'visual': Shared(rate=10.0), 'wei*': Shared(rate=2.0)}\n"
    run_of("from fedvl.methods.roles import Shared\n" + method() + helper + roles, tmp_path)
    assert (tmp_path / "run/result.json").exists()


def run_of(code: str, folder: Path) -> None:
    """Run a method of this code as a user would."""
    file = folder / "mine.py"
    file.write_text(code)
    settings = {
        "method": {"name": str(file)},
        "data": {"clients": 2, "shots": 5, "test_shots": 5, "partition": "iid"},
        "federation": {"rounds": 1, "threads": 1},
    }
    with RunFolder.create(folder / "run", resolve_experiment(settings)) as opened:
        complete(opened, Silent(), OPENER)


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_told_by_its_line_and_its_rule(kind: str, tmp_path: Path) -> None:
    code, line, said = MISTAKES[kind]
    with pytest.raises(FedVLError) as caught:
        run_of(code, tmp_path)
    sentence = str(caught.value)
    assert sentence.startswith("mine.py")
    assert re.search(said if not said.startswith("breaks") else re.escape(said), sentence)
    assert "\n" not in sentence
    assert not re.search("vmap|functorch|please file", sentence)
    if line:
        number = 1 + next(number for number, text in enumerate(code.splitlines()) if line.strip("`") in text)
        assert f"mine.py, line {number}, in " in sentence
        assert line in sentence
    else:
        assert "docs/contract.md" in sentence
    assert not (tmp_path / "run").exists()
