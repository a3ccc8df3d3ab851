"""Metrics and protocols."""
