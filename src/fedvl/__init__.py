"""FedVL: adapt one pretrained vision-language model together, without pooling images.

``fedvl.run(...)`` runs an experiment, ``fedvl.resume(folder)`` goes on with one that was interrupted,
``fedvl.open_run(folder)`` opens a finished one, and ``fedvl.compare(...)`` compares methods. What a user can mend is raised as
``fedvl.FedVLError``. Importing the package loads nothing heavy.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedvl.errors import FedVLError

if TYPE_CHECKING:
    from fedvl.api import compare, open_run, resume, run

__version__ = "0.1.0"
__all__ = ["FedVLError", "__version__", "compare", "open_run", "resume", "run"]

# Idle threads of the processor sleep rather than spin: on a busy machine spinning makes small steps several times slower.
# Torch reads this when it is imported, so that it must be said before; after that it changes nothing.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A package has the name of the function. Loaded here, once and for all, it cannot take the name later.
import_module("fedvl.compare")
globals().pop("compare", None)


def __getattr__(name: str) -> Any:
    """Load the front door when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'fedvl' has no attribute '{name}'")
    from fedvl import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
