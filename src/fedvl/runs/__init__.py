"""A run: settings, preparation, rounds, result and files."""
