"""Tests of pages as a user sees them: in a real Chromium (helpers/browser.py)."""
