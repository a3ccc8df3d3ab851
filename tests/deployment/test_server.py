"""The server of a federation: what goes wrong in its method's own file is told to the author."""

from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from fedvl.deployment import server
from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.membership import create
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.runs.folder import RunFolder

HOOKS = {
    "def start(self, generator):\n        return {'weight': self.task.text}": (
        "linear.py, line 6, in start: `return {'weight': self.task.text}` fails with AttributeError: "
    ),
    "def start(self, generator):\n        return [1]": (
        "linear.py does not fit docs/contract.md: start must return a dictionary of tensors by name, and returns a list."
    ),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_mistake_in_its_method_is_told_by_its_line(hook, own_method, tmp_path, monkeypatch):
    """All but the network is real; the parties seem to be there."""
    experiment = resolve_for_parties({"method": {"name": "linear"}, "data": {"test_shots": 2}}, 2)
    create(tmp_path / "clinic", ["north", "south"], "127.0.0.1", 9443, experiment)
    mine, prepare = own_method(hook), server.prepare_server

    def prepared(*words: Any) -> Any:
        found = prepare(*words)
        found.method.__class__ = mine
        return found

    @contextmanager
    def linked(*words: Any) -> Any:
        yield SimpleNamespace(address="", secret="", nodes={})

    transport = nullcontext(SimpleNamespace(connected=lambda: {0, 1}))
    monkeypatch.setattr(server, "prepare_server", prepared)
    monkeypatch.setattr(server, "opened_link", linked)
    monkeypatch.setattr(server, "flower", lambda: SimpleNamespace(flower_run=lambda *words: transport))
    with (
        RunFolder.create(tmp_path / "run", experiment, server.federation_summary(tmp_path / "clinic")) as folder,
        pytest.raises(FedVLError) as caught,
    ):
        server.complete_with_machines(folder, Silent())
    assert str(caught.value).startswith(HOOKS[hook])
