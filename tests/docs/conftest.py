"""Tests of the documentation: every method has its page, and the worked example works."""
