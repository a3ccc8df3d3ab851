"""Many runs in one go: grids, what is measured of them, and the recipes of the papers."""
