"""Metrics of the service in Prometheus format."""

from bisect import bisect_left
from collections.abc import Sequence

from fedvl.report.prometheus import Metric, exposition
from fedvl.serve.model import Line
from fedvl.serve.worker import Worker

SECONDS_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    def __init__(self) -> None:
        self.answered = self.refused = self.busy = 0
        self._waited = [0] * (len(SECONDS_BOUNDS) + 1)
        self._seconds = 0.0

    def count(self, lines: Sequence[Line], seconds: float) -> None:
        """Count images whose results were sent ``seconds`` after their request arrived."""
        refused = sum("refused" in line for line in lines)
        self.refused += refused
        self.answered += len(lines) - refused
        self._waited[bisect_left(SECONDS_BOUNDS, seconds)] += len(lines)
        self._seconds += seconds * len(lines)

    def text(self, sessions: int, worker: Worker) -> str:
        plain = exposition(
            [
                Metric("images_answered_total", "counter", "Images whose predictions were sent.", self.answered),
                Metric("images_refused_total", "counter", "Images that could not be used.", self.refused),
                Metric("requests_refused_busy_total", "counter", "Requests refused for lack of room.", self.busy),
                Metric("sessions", "gauge", "Sessions of users.", sessions),
                Metric("images_pending", "gauge", "Images that wait for their prediction.", len(worker.pending)),
                Metric("encoder_batches_total", "counter", "Batches that the encoder read.", worker.batches),
                Metric("encoder_images_total", "counter", "Images that the encoder read.", worker.encoded),
                Metric("encoder_seconds_total", "counter", "Seconds that the encoder worked.", worker.seconds),
            ]
        )
        lines = [
            "# HELP fedvl_answer_seconds Seconds from the request of an image to its prediction.",
            "# TYPE fedvl_answer_seconds histogram",
        ]
        total = 0
        for bound, count in zip((*map(str, SECONDS_BOUNDS), "+Inf"), self._waited, strict=True):
            total += count
            lines.append(f'fedvl_answer_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"fedvl_answer_seconds_sum {self._seconds}", f"fedvl_answer_seconds_count {total}"]
        return plain + "\n".join(lines) + "\n"
