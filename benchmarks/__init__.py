"""Speed, as ratios against peers in one run. Nothing here is part of the package or of its tests."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line has it; read when torch is first imported
