"""Charts as pure functions from numbers to SVG text, a module a kind. Colours come from the page's style sheet by class name."""
