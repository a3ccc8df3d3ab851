"""The version, apart from everything that it is the version of, and how to install extras."""

import re

__version__ = "0.2.0"


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, from wherever FedVL came."""
    from importlib.metadata import requires

    parts = (line.partition(";") for line in requires("fedvl") or ())
    named = [package.strip() for package, _, rest in parts if re.search(rf"extra\s*==\s*[\"']{extra}[\"']", rest)]
    return "pip install " + " ".join(f'"{package}"' for package in named)
