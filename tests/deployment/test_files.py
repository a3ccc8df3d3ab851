"""What server and client agree on before the first round."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from fedvl.deployment.files import experiment_id
from fedvl.settings import resolve_experiment


def test_server_and_client_must_have_the_same_settings_and_weights():
    def identity(weights, **settings):
        encoder: Any = SimpleNamespace(fingerprint=weights)
        return experiment_id(resolve_experiment(settings), encoder)

    assert identity("abc", seed=0) == identity("abc", seed=0) == identity("abc")  # 0 is the default
    assert len({identity("abc", seed=0), identity("abc", seed=1), identity("abd", seed=0)}) == 3
