"""What people read after a run: the terminal table, the figures and the self-contained page."""
