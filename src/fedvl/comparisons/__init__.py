"""Grids of runs, measures of finished runs, and the recipes of the papers' tables and figures."""
