"""Tests of what must not go wrong whatever happens: the faults of docs/reliability.md, one file for each kind."""
