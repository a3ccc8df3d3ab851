"""Rounds of choosing, training, checking, merging and committing, in one process or across machines."""
