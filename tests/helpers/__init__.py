"""What tests share, imported as ``from helpers.small import ...``; benchmarks import some of it as ``tests.helpers``."""
