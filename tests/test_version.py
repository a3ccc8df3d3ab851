"""How the packages of an extra are installed."""

import tomllib
from pathlib import Path

from fedvl.version import install_command

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_command_names_the_packages_and_not_a_package_of_another_owner() -> None:
    for extra in (
        "parquet",
        "dicom",
        "heic",
        "flower",
        "privacy",
        "serve",
        "mlflow",
        "wandb",
        "tensorboard",
        "generate",
    ):
        words = install_command(extra).removeprefix("pip install ").split('" "')
        found = sorted("".join(sorted(word.strip('"').replace(" ", ""))) for word in words)
        assert found == sorted("".join(sorted(package)) for package in EXTRAS[extra])
        assert "fedvl" not in install_command(extra)
    assert install_command("privacy") == 'pip install "dp-accounting==0.6.0"'
