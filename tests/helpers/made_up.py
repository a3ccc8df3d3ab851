"""Made-up runs of any size, shaped as the engine writes them: what tests of reports share."""

import json
from pathlib import Path
from typing import Any

import numpy as np

CIFAR = ["aeroplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def make_result(
    classes: int = 10, clients: int = 20, rounds: int = 10, method: str = "fst-cbdg", seed: int = 0, alpha: float = 0.3
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A result.json and the lines of its metrics.jsonl."""
    draw = np.random.default_rng(seed)
    names = (
        list(CIFAR) if classes == 10 else [f"class number {index} with a rather long name" for index in range(classes)]
    )
    per_class = 100
    confusion = np.stack([draw.multinomial(per_class, _row(draw, classes, row)) for row in range(classes)])
    recall = np.diag(confusion) / per_class * 100
    zero_shot_recall = np.clip(np.round(recall - draw.normal(12, 12, classes)), 0, 100)
    final, start = float(recall.mean()), float(zero_shot_recall.mean())
    counts = np.stack([draw.multinomial(200, draw.dirichlet(np.full(clients, alpha))) for _ in range(classes)], axis=1)
    curve = [round(start + (final - start) * (1 - 0.7**index), 2) for index in range(1, rounds)] + [final] * (
        rounds > 0
    )
    cohort = min(10, clients)
    result: dict[str, Any] = {
        "schema": 1,
        "fedvl_version": "0.1.0",
        "method": method,
        "preset": "paper",
        "dataset": "cifar10-mini",
        "model": "fedvl-tiny",
        "partition": f"dirichlet:{alpha}",
        "clients": clients,
        "rounds": rounds,
        "seed": seed,
        "protocol": "closed",
        "accuracy": final,
        "zero_shot_accuracy": start,
        "macro_precision": final + 0.37,
        "macro_recall": final,
        "macro_f1": final - 0.21,
        "per_round": curve,
        "per_round_loss": [round(2.3 * 0.8**index, 4) for index in range(rounds)],
        "trainable_parameters": 512 * classes,
        "bytes_up_per_client_round": 2048 * classes,
        "bytes_down_per_client_round": 2048 * classes,
        "local_flops": 3_145_728_000,
        "seconds": {"encode": 0.4, "train": 75.2, "evaluate": 0.031},
        "refused_updates": 0,
        "state_sha256": "9f2c" * 16,
        "class_names": names,
        "partition_counts": counts.tolist(),
        "partition_note": "Drawn at the first attempt.",
        "confusion": confusion.tolist(),
        "per_class_recall": recall.tolist(),
        "zero_shot_per_class_recall": zero_shot_recall.tolist(),
        "skipped_images": [],
        "device": "cpu",
        "started": "2026-01-05T10:00:00+00:00",
        "config": {
            "method": {"name": method, "sigma": 0.02},
            "data": {"name": "cifar10-mini", "shots": None},
            "seed": seed,
        },
        "command": f"fedvl run --method {method} --clients {clients} --rounds {rounds} --seed {seed}",
        "notes": [],
    }
    metrics = [
        {
            "round": index + 1,
            "accuracy": curve[index],
            "loss": result["per_round_loss"][index],
            "cohort": sorted(int(client) for client in draw.choice(clients, cohort, replace=False)),
            "dropped": [],
            "refused": [],
            "bytes_up": cohort * 2048 * classes,
            "bytes_down": cohort * 2048 * classes,
            "seconds": 0.25,
        }
        for index in range(rounds)
    ]
    return result, metrics


def _row(draw: np.random.Generator, classes: int, true: int) -> np.ndarray:
    weights = draw.dirichlet(np.full(classes, 0.3))
    weights[true] += draw.uniform(1, 6)
    return weights / weights.sum()


def save_run(folder: Path, result: dict[str, Any], metrics: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics), encoding="utf-8")
    return folder
