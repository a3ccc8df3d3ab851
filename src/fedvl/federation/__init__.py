"""Rounds: choose clients, train, check, merge, evaluate and commit."""
