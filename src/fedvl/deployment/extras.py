"""Optional packages that an experiment or images need, looked for before anything starts."""

import os
from importlib.util import find_spec
from pathlib import Path

from fedvl.config import Experiment
from fedvl.errors import FedVLError
from fedvl.version import install_command

EXTRA_PACKAGES = {"privacy": "dp_accounting", "dicom": "pydicom", "heic": "pillow_heif"}
IMAGES = {".dcm": "dicom", ".heic": "heic", ".heif": "heic"}  # a table is opened at once, and says what it needs


def check_extras(experiment: Experiment, images: str | None = None) -> None:
    """Refuse an experiment, or images in a folder, that need a package that is not installed."""
    if experiment.privacy.unit != "none":
        need("privacy", "Differential privacy (--privacy)")
    for extra in {*IMAGES.values()} if images else ():
        if find_spec(EXTRA_PACKAGES[extra]) is None and (found := first_image(images or "", extra)):
            need(extra, f"The image {found}")


def need(extra: str, what: str) -> None:
    if find_spec(EXTRA_PACKAGES[extra]) is None:
        raise FedVLError(f"{what} needs {EXTRA_PACKAGES[extra]}: {install_command(extra)}.")


def first_image(folder: str, extra: str) -> Path | None:
    """Return an image below a folder that an extra reads, or None."""
    for parent, _, files in os.walk(Path(folder).expanduser()):
        for name in sorted(files):
            if IMAGES.get(Path(name).suffix.lower()) == extra and not name.startswith("."):
                return Path(parent, name)
    return None
