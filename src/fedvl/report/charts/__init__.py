"""Charts as pure functions from numbers to SVG text; the page's style sheet gives the colours."""
