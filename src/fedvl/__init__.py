"""FedVL: adapt one pretrained vision-language model together, without pooling images.

``fedvl.run(...)`` runs an experiment, ``fedvl.resume(folder)`` continues one that was interrupted,
``fedvl.open_run(folder)`` opens a finished one; ``fedvl.compare(...)`` compares methods,
``fedvl.sweep(...)`` chooses settings, and ``fedvl.open_comparison(folder)`` opens what they made.
What a user can mend is raised as ``fedvl.FedVLError``. Importing the package loads nothing heavy.
"""

import os
from typing import TYPE_CHECKING, Any

from fedvl.errors import FedVLError
from fedvl.version import __version__

if TYPE_CHECKING:
    from fedvl.api import compare, open_comparison, open_run, resume, run, sweep

__all__ = ["FedVLError", "__version__", "compare", "open_comparison", "open_run", "resume", "run", "sweep"]

# Idle processor threads sleep rather than spin, which on a busy machine makes small steps several times slower.
# Torch reads this when it is imported, and not again.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def __getattr__(name: str) -> Any:
    """Load the front door when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'fedvl' has no attribute '{name}'")
    from fedvl import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
