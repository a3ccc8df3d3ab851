"""Pictures for papers and READMEs, drawn with matplotlib (imported only when one is asked for)."""

from pathlib import Path
from typing import Any

from fedvl.errors import FedVLError
from fedvl.report.reading import accuracy_series, number


def accuracy_figure(result: dict[str, Any], path: Path) -> Path:
    """Accuracy over rounds against zero-shot as PNG, SVG or PDF, by the ending of `path`; same result, same bytes."""
    known = accuracy_series(result)
    if not known:
        raise FedVLError("There is no curve to draw: the result has no rounds; choose a run of a method that trains.")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Names are text, also with dollar signs in them.
    settings: dict[Any, Any] = {
        "svg.hashsalt": "fedvl",
        "font.size": 10,
        "svg.fonttype": "none",
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(6.4, 3.4), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(*zip(*known, strict=True), color="#2a5bd0", marker="o", markersize=4, label=str(result["method"]))
        reference = number(result.get("zero_shot_accuracy"))
        if reference is not None:
            axes.axhline(reference, color="#7a6a2f", linestyle="--", label="zero-shot")
        axes.set(xlabel="round", ylabel="accuracy, %", title=f"{result['method']} on {result.get('dataset', '')}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False)
        # Dates would make each file different.
        stamps = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(path, metadata=stamps.get(path.suffix.lower(), {}))
    return path
