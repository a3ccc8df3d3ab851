"""A federation between real machines: the folders of its parties, the server, the clients."""

import importlib.metadata
import importlib.util

from fedvl.errors import FedVLError
from fedvl.version import install_command

FLOWER = "1.41.0"  # flower.py uses parts of it that another version may not have

if importlib.util.find_spec("flwr") is None:
    raise FedVLError(f"A federation between machines needs Flower: {install_command('flower')}.")
if (installed := importlib.metadata.version("flwr")) != FLOWER:
    raise FedVLError(f"FedVL works with Flower {FLOWER}, and {installed} is installed; pip install flwr=={FLOWER}.")
