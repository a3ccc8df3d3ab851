"""A federation between real machines: the folders of its parties, the server, the clients."""

import importlib.util

from fedvl.errors import FedVLError

if importlib.util.find_spec("flwr") is None:
    raise FedVLError('A federation between machines needs Flower; install it with pip install "fedvl[flower]".')
