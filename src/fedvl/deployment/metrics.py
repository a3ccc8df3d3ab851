"""Metrics of a client in Prometheus format: what it answered, refused, received and sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedvl.deployment.messages import Message
from fedvl.federation.records import Budget
from fedvl.report.prometheus import Metric, exposition


@dataclass
class Answered:
    """Counts of this process, from its start on."""

    images: int
    kinds: dict[str, int] = field(default_factory=dict)  # of requests that were answered
    refused: int = 0
    received: int = 0
    sent: int = 0
    seconds: float = 0.0  # of the last answer
    round: int = 0
    budget: Budget | None = None  # that the run answered last has spent

    def count(self, request: Message, reply: Message, seconds: float, spent: Sequence[Budget] | None) -> None:
        """Count a request and its answer; ``spent`` is its run's ledger, None once it is over."""
        header, answer = request.header, reply.header
        self.received += len(request.payload)
        self.sent += len(reply.payload)
        if answer.problem:
            self.refused += 1
            return
        self.kinds[header.kind] = self.kinds.get(header.kind, 0) + 1
        self.seconds, self.round = seconds, header.round + 1
        if spent is not None:
            self.budget = spent[-1] if spent else None

    def text(self) -> str:
        metrics = [
            Metric("images", "gauge", "Images of this party that are trained on.", self.images),
            Metric("requests_answered_total", "counter", "Requests answered, by kind.", dict(self.kinds), "kind"),
            Metric("requests_refused_total", "counter", "Requests refused.", self.refused),
            Metric("received_bytes_total", "counter", "Bytes of tensors from the server.", self.received),
            Metric("sent_bytes_total", "counter", "Bytes of tensors to the server.", self.sent),
            Metric("answer_seconds", "gauge", "Seconds that the last answer took.", self.seconds),
            Metric("round", "gauge", "Round of the last answer.", self.round),
        ]
        if self.budget:
            spent = "Privacy budget that this party's images have spent in the run answered last."
            by_unit: dict[str, float] = {self.budget.unit: self.budget.epsilon}
            metrics.append(Metric("epsilon_spent", "gauge", spent, by_unit, "unit"))
        return exposition(metrics)
