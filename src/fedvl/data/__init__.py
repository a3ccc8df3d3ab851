"""Datasets: sources, catalogue, partition among clients, missing modalities and feature cache.

Nothing is imported here, so that `fedvl.data.catalogue` stays light enough for the command line.
"""
