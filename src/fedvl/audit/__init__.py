"""Audits: attacks on a run's own messages, and what they find said in plain words."""
