"""Measure how far one unit moves what leaves clients, for every method and protocol that --privacy accepts.

    python -m benchmarks.sensitivity [--methods linear fedtpg ...] [--refused]

A row for each method and unit: the protocols that are accepted, and the largest change of a noise-free sum between
neighbouring datasets, in clips. It must be 1 at most, up to rounding. ``--refused`` prints each refusal too.
"""

import argparse

import torch

from fedvl.methods import method_names
from tests.helpers.sensitivity import CHANGES, MOST, UNITS, Unit, refusal, sensitivity, settings_of


def row(method: str, unit: Unit, refusals: list[str]) -> str:
    """Return the line of a table."""
    largest, uncovered, accepted, count = 0.0, 0, dict[str, None](), 0
    for setting in settings_of(method, unit):
        if reason := refusal(setting):
            refusals.append(f"{setting.words}: {reason}")
            continue
        for change in CHANGES:
            found = sensitivity(setting, change)
            largest, uncovered, count = max(largest, found.moved), uncovered + len(found.uncovered), count + 1
        accepted[setting.protocol + " (several datasets)" * setting.several] = None
    if not count:
        return f"| {method} | {unit} | refused | | | |"
    holds = "yes" if largest <= MOST and not uncovered else "NO"
    return f"| {method} | {unit} | {', '.join(accepted)} | {count} | {largest:.6f} | {holds} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=method_names())
    parser.add_argument("--refused", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| method | unit | accepted protocols | pairs | largest change, clips | holds |\n|---|---|---|---|---|---|")
    refusals: list[str] = []
    for method in arguments.methods:
        for unit in UNITS:
            print(row(method, unit, refusals), flush=True)
    if arguments.refused:
        print("\n".join(["", *refusals]))


if __name__ == "__main__":
    main()
