"""The commands of ``cli.py``, by area; nothing heavy is imported until one is run."""
