"""Metrics of the service in Prometheus format."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from fedvl.serve.worker import Worker

BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    def __init__(self) -> None:
        self.answered = self.refused = self.busy = 0
        self._waited = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def count(self, lines: Sequence[dict[str, Any]], seconds: float) -> None:
        """Count images whose results were sent ``seconds`` after their request arrived."""
        refused = sum("refused" in line for line in lines)
        self.refused += refused
        self.answered += len(lines) - refused
        self._waited[bisect_left(BOUNDS, seconds)] += len(lines)
        self._seconds += seconds * len(lines)

    def text(self, sessions: int, worker: Worker) -> str:
        plain = {
            ("images_answered_total", "counter"): self.answered,
            ("images_refused_total", "counter"): self.refused,
            ("requests_refused_busy_total", "counter"): self.busy,
            ("sessions", "gauge"): sessions,
            ("images_pending", "gauge"): len(worker.pending),
            ("encoder_batches_total", "counter"): worker.batches,
            ("encoder_images_total", "counter"): worker.encoded,
            ("encoder_seconds_total", "counter"): worker.seconds,
        }
        lines = [
            line
            for (name, kind), value in plain.items()
            for line in (f"# TYPE fedvl_{name} {kind}", f"fedvl_{name} {value}")
        ]
        lines.append("# TYPE fedvl_answer_seconds histogram")
        total = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._waited, strict=True):
            total += count
            lines.append(f'fedvl_answer_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"fedvl_answer_seconds_sum {self._seconds}", f"fedvl_answer_seconds_count {total}"]
        return "\n".join(lines) + "\n"
