"""The version, apart from everything that it is the version of."""

__version__ = "0.1.0"
