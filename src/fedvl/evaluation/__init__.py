"""Prediction, metrics and evaluation protocols."""
