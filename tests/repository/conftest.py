"""Tests of the repository itself: workflows, templates, citation, changelog."""
