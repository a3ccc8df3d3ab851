"""Read the text format of Prometheus, by its description: every line, or an error."""

import re
from contextlib import suppress
from urllib.request import urlopen

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")


def read_metrics(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples by name and labels; refuse what Prometheus would, and a sample of an undeclared metric."""
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            said = re.fullmatch(rf"# (HELP|TYPE) ({NAME}) (.+)", line)
            assert said, line
            if said[1] == "TYPE":
                assert said[2] not in kinds
                assert said[3] in ("counter", "gauge", "histogram"), line
                kinds[said[2]] = said[3]
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        family = re.sub("_(bucket|sum|count)$", "", sample[1]) if sample[1] not in kinds else sample[1]
        assert family in kinds, line
        assert kinds[family] != "counter" or sample[1].endswith("_total"), line
        labels = tuple(
            (name, re.sub(r"\\(.)", lambda e: {"n": "\n"}.get(e[1], e[1]), value))
            for name, value in re.findall(LABEL, sample[2] or "")
        )
        assert (sample[1], labels) not in found, line
        found[sample[1], labels] = float(sample[sample.re.groups])
    return found


def scraped(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return what a process of this machine offers on a port; nothing if it does not yet."""
    with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return read_metrics(response.read().decode())
    return {}
