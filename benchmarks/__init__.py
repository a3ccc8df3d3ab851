"""Benchmarks of speed, accuracy and faults.

They are not part of the package or of its tests.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in the command line; torch reads it on import
