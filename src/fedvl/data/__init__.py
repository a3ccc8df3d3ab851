"""Images in: sources, the catalogue of known datasets, partitions between clients, and the feature cache.

Nothing is imported here, so that `fedvl.data.catalogue` stays light enough for the command line.
"""
