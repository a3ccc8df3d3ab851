"""Terminal tables, charts and self-contained HTML pages for finished runs."""
