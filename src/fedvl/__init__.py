"""FedVL: adapt one pretrained vision-language model together, without pooling images.

``fedvl.run(...)`` runs an experiment, ``fedvl.compare(...)`` compares methods, ``fedvl.open_run(folder)``
opens a finished run. Importing the package loads nothing heavy.
"""

from typing import TYPE_CHECKING, Any

from fedvl.version import __version__

if TYPE_CHECKING:
    from fedvl.api import compare, open_run, run

__all__ = ["__version__", "compare", "open_run", "run"]


def __getattr__(name: str) -> Any:
    """Load the front door when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'fedvl' has no attribute '{name}'")
    from fedvl import api

    return getattr(api, name)
