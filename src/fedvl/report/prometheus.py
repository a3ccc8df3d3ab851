"""Metrics in the text format of Prometheus."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from fedvl.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """One metric: a number, or numbers by the values of one label."""

    name: str  # without fedvl_
    kind: Literal["counter", "gauge"]
    help: str
    value: float | Mapping[str, float]
    label: str = ""


def exposition(metrics: Iterable[Metric]) -> str:
    """Return the metrics as text, with the version of FedVL first."""
    build = Metric("build_info", "gauge", "Version of FedVL.", {__version__: 1}, "version")
    return "".join(lines_of(metric) for metric in (build, *metrics))


def lines_of(metric: Metric) -> str:
    name = f"fedvl_{metric.name}"
    head = f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n"
    if not isinstance(metric.value, Mapping):
        return f"{head}{name} {metric.value}\n"
    return head + "".join(
        f'{name}{{{metric.label}="{escaped(label)}"}} {value}\n' for label, value in metric.value.items()
    )


def escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
