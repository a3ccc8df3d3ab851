"""What server and client agree on before the first round."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from fedvl.deployment.server import experiment_id


def test_server_and_client_must_have_the_same_settings_and_weights(tmp_path):
    path = tmp_path / "experiment.toml"

    def identity(settings, weights):
        path.write_text(settings)
        encoder = SimpleNamespace(fingerprint=weights)
        prepared: Any = SimpleNamespace(method=SimpleNamespace(task=SimpleNamespace(encoder=encoder)))
        return experiment_id(path, prepared)

    assert identity("seed = 0", "abc") == identity("seed = 0", "abc")
    assert len({identity("seed = 0", "abc"), identity("seed = 1", "abc"), identity("seed = 0", "abd")}) == 3
