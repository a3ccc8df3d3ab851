"""Rounds of choosing, training, checking, merging, evaluating and committing, in one process or across machines."""
