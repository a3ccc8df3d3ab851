"""``python -m fedvl`` and ``torchrun ... -m fedvl``: the same command line."""

from fedvl.cli import main

main()
