"""What tests of federations between machines share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedvl.methods import load_file
from fedvl.methods.base import Method


@pytest.fixture
def own_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], type[Method]]:
    """A method in the package under the name linear, of an author who wrote this hook."""

    def make(hook: str) -> type[Method]:
        file = tmp_path / "linear.py"
        file.write_text(f"from fedvl.methods.linear import Linear\n\n\nclass Mine(Linear):\n    {hook}\n")
        (tmp_path / "embedded.toml").write_text("")  # no preset of its own
        monkeypatch.setattr("fedvl.methods.FOLDER", tmp_path)
        return load_file(file).Mine

    return make
