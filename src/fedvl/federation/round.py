"""The only loop: choose -> train -> check -> merge -> commit."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedvl.config import FederationConfig
from fedvl.errors import FedVLError
from fedvl.federation.checks import Refusal, sort_out
from fedvl.federation.journal import Journal
from fedvl.federation.local import Trained
from fedvl.methods.base import Method, Update
from fedvl.seeding import numpy_generator
from fedvl.tensors import Tensors, count_bytes

Record = dict[str, Any]


class Engine(Protocol):
    """Where clients are trained: in this process or on other machines."""

    private: dict[int, Tensors]

    @property
    def clients(self) -> int: ...

    def train(self, round_index: int, cohort: Sequence[int], shared: Tensors) -> list[Trained]: ...

    def keep(self, trained: list[Trained]) -> None: ...


@dataclass
class Federation:
    """A run between two rounds: what the server hands out, what it keeps, and the records of the rounds behind it."""

    method: Method
    engine: Engine
    config: FederationConfig
    seed: int
    shared: Tensors
    records: list[Record] = field(default_factory=list)
    journal: Journal | None = None
    kept: Tensors = field(default_factory=dict)

    def run(self, evaluate: Callable[[Tensors, Tensors, int], Record], after_round: Callable[[Record], None]) -> None:
        """Run the rounds that are still to come; a round that was committed is not run again."""
        for round_index in range(len(self.records), self.config.rounds):
            began = time.perf_counter()
            cohort, trained, good, refusals = self._gather(round_index)
            merged = self.method.merge(self.shared, good)
            kept = self.method.remember(self.kept, good)
            record: Record = {
                "round": round_index + 1,
                "cohort": cohort,
                "dropped": sorted(set(cohort) - {result.update.client for result in trained}),
                "refused": [refusal._asdict() for refusal in refusals],
                "loss": sum(result.loss for result in trained) / len(trained),
                "bytes_up": sum(count_bytes(result.update.tensors) for result in trained),
                "bytes_down": count_bytes(self.shared) * len(cohort),
                "seconds": time.perf_counter() - began,
                **evaluate(merged, kept, round_index + 1),
            }
            merged_clients = {update.client for update in good}
            self.engine.keep([result for result in trained if result.update.client in merged_clients])
            if self.journal:
                self.journal.commit(round_index + 1, self._everything(merged, kept), record)
            self.shared, self.kept = merged, kept
            self.records.append(record)
            after_round(record)

    def restore(self) -> None:
        """Go on from the newest committed round of the journal, if there is one."""
        found = self.journal.latest() if self.journal else None
        if found is None:
            return
        tensors, self.records = found
        owners: dict[str, Tensors] = {}
        for key, tensor in tensors.items():
            owner, name = key.split("/", 1)
            owners.setdefault(owner, {})[name] = tensor
        self.shared, self.kept = owners.pop("shared"), owners.pop("kept", {})
        self.engine.private.update({int(client): private for client, private in owners.items()})

    def _everything(self, shared: Tensors, kept: Tensors) -> Tensors:
        """All state as one set of names: shared/NAME, kept/NAME and CLIENT/NAME."""
        owners = {"shared": shared, "kept": kept, **{str(c): private for c, private in self.engine.private.items()}}
        return {f"{owner}/{name}": tensor for owner, part in owners.items() for name, tensor in part.items()}

    def _gather(self, round_index: int) -> tuple[list[int], list[Trained], list[Update], list[Refusal]]:
        """Draw clients until enough of them give a usable update; then stop, for a round of nothing is not a round."""
        refusals: list[Refusal] = []
        for attempt in range(self.config.attempts):
            cohort = self._choose(round_index, attempt)
            trained = self.engine.train(round_index, self._answering(cohort, round_index, attempt), self.shared)
            updates = [result.update for result in trained]
            good, refused = sort_out(updates, cohort, self.shared, self.method.extra_shapes(), self.config)
            refusals += refused
            if len(good) >= self.config.quorum:
                return cohort, trained, good, refusals
        reasons = f" Last refusal: client {refusals[-1].client}, {refusals[-1].reason}." if refusals else ""
        raise FedVLError(
            f"Round {round_index + 1} got {len(good)} usable updates in its last of {self.config.attempts} attempts, fewer than "
            f"the quorum of {self.config.quorum}; committed rounds are safe: lower federation.quorum or wait for clients, "
            f"then resume.{reasons}"
        )

    def _choose(self, round_index: int, attempt: int) -> list[int]:
        generator = numpy_generator(self.seed, "choose", round_index, attempt)
        count = min(self.config.per_round or self.engine.clients, self.engine.clients)
        return sorted(int(client) for client in generator.choice(self.engine.clients, count, replace=False))

    def _answering(self, cohort: list[int], round_index: int, attempt: int) -> list[int]:
        if not self.config.dropout:
            return cohort
        draws = numpy_generator(self.seed, "dropout", round_index, attempt).random(len(cohort))
        return [client for client, draw in zip(cohort, draws, strict=True) if draw >= self.config.dropout]
