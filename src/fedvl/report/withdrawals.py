"""Say in words what the withdrawal of a client changes."""

from typing import Any


def sentences(measured: dict[str, Any]) -> list[str]:
    """Say in words what a withdrawal changes."""
    run, without = measured["run"], measured["without"]
    who = measured["party"] or f"client {measured['client']}"
    low, high = measured["difference_interval"]
    told = [
        f"With {who}: {accuracy_of(run)}; without: {accuracy_of(without)}, on the same {measured['images']:,} test images.",
        f"Difference: {measured['difference']:+.2f} points (95 % interval {low:+.2f} to {high:+.2f}, paired). "
        f"{measured['changed']:.2f} % of the answers changed "
        f"({measured['changed_interval'][0]:.2f} to {measured['changed_interval'][1]:.2f}).",
    ]
    if measured["moved"]:
        share = 100 * measured["distance"] / measured["moved"]
        told.append(f"The trained tensors lie {share:.1f} % as far apart as training moved them.")
    spent = measured.get("privacy")
    if not measured["same_draws"]:
        drawn = "Noise and samples are drawn anew" if spent else "Parties draw from new secrets in every run"
        told.append(f"{drawn}, so that part of the difference is chance.")
    if spent:
        told.append(
            f"Budgets add: both models together spend epsilon {spent['epsilon']:.2f}, delta {spent['delta']:g}, of each "
            f"{spent['of']} that is in both."
        )
    return told


def accuracy_of(run: dict[str, Any]) -> str:
    bounds = run.get("interval")
    return f"{run['accuracy']:.2f} %" + (f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else "")
