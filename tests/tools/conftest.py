"""Tests of tools/, which made the embedded models and images; nothing of it is in the package."""
