"""Tests of many modules together: whole runs, from data to report, in one process or between several."""
