"""Commands that are registered in ``cli.py``, by area; nothing heavy is imported until one is run."""
