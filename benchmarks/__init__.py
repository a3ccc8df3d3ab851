"""Speed, as ratios against peers in one run. Nothing here is part of the package or of its tests."""
