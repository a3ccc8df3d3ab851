"""Measure a model on the test, on clients' own parts, or under missing modalities."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvl.evaluation.base_to_new import Hits, all_right
from fedvl.evaluation.contents import Condition
from fedvl.evaluation.metrics import confusion_matrix, summary
from fedvl.evaluation.personal import personal_answers, personal_confusions, personal_figures
from fedvl.evaluation.predict import predict_classes, predict_shares
from fedvl.evaluation.statistics import bootstrap_macro
from fedvl.methods.base import Method, Options, Samples
from fedvl.methods.zero_shot import ZeroShot
from fedvl.tensors import ByClient, Tensors

Models = tuple[Method, Sequence[Tensors]]  # a method for some classes, and the tensors of each model


class Judged(NamedTuple):
    """How a model did on the test."""

    confusion: NDArray[np.int64]
    figures: dict[str, Any]  # accuracy and further ones, in percent
    answers: NDArray[np.int64]  # the class given to each test row; -1 where nobody queried
    shares: NDArray[np.float64]  # of that class in the softmax of scores; not a number where there is none
    entropies: NDArray[np.float64]  # of the shares of all classes, in nats


@dataclass(frozen=True)
class Judge:
    """The test of a run: queries, and whose model answers them."""

    method: Method  # for the queried classes
    test: Samples
    batch_size: int
    parts: Sequence[Tensor] = ()  # rows of ``test`` that each client queries; none unless it has its own test
    conditions: Mapping[str, Samples] = field(default_factory=dict)  # of the missing-modality protocol
    private_of: Callable[[int], Tensors] = lambda client: {}
    candidates: Sequence[Tensor] = ()  # classes among which each client is asked; none: among all
    for_new: Method | None = None  # for classes that nobody trained on, and images of these
    new: Samples | None = None
    temperature: float = 1.0  # that divides scores before their softmax

    def judge(self, shared: Tensors, last: ByClient) -> Judged:
        """Judge the model that these tensors make; in the personal protocol, each client's own."""
        tensors = self.method.tailor(shared, last)
        return self._judge(self.method, lambda client: {**tensors, **self.private_of(client)}, tensors)

    def judge_models(self, tensors_of: Callable[[int], Tensors]) -> Judged:
        """Judge each client's part of the test by a model of its own."""
        return self._judge(self.method, tensors_of, {})

    def shares(
        self, shared: Tensors, last: ByClient, temperature: float = 1.0
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return labels of labelled rows, and the shares of all classes by their models."""
        labelled = self.test.labels >= 0
        tensors = self.method.tailor(shared, last)
        groups: list[tuple[Tensors, Tensor]] = [({}, torch.nonzero(labelled).flatten())]
        if self.parts:
            groups = [(self.private_of(client), rows[labelled[rows]]) for client, rows in enumerate(self.parts)]
        samples = [(own, self.test.take(rows)) for own, rows in groups]
        return (
            np.concatenate([part.labels.cpu().numpy() for _, part in samples]),
            np.concatenate(
                [
                    predict_shares(self.method, {**tensors, **own}, part, self.batch_size, temperature)
                    for own, part in samples
                ]
            ),
        )

    def judge_zero_shot(self) -> Judged | None:
        """Judge the pretrained model; None for a fused one, or one without texts of the classes."""
        if "features" not in self.test.inputs or not self.method.task.has_texts:
            return None
        return self._judge(ZeroShot(Options(), self.method.task), lambda client: {}, {})

    def judge_conditions(self, shared: Tensors, last: ByClient) -> list[Condition]:
        """Return accuracy and macro-F1 under each condition; equal conditions are judged once."""
        judged = {
            id(samples): replace(self, test=samples).judge(shared, last)
            for samples in {id(samples): samples for samples in self.conditions.values()}.values()
        }
        intervals = {key: list(bootstrap_macro(found.confusion)["macro_f1"]) for key, found in judged.items()}
        return [
            Condition(
                condition=condition,
                accuracy=judged[id(samples)].figures["accuracy"],
                macro_f1=judged[id(samples)].figures["macro_f1"],
                macro_f1_interval=intervals[id(samples)],
            )
            for condition, samples in self.conditions.items()
        ]

    def judge_sets(self, judged: Judged, shared: Tensors, last: ByClient) -> Hits:
        """Return per-image correctness on each candidate set; ``judged`` has that of ``own``."""
        assert self.for_new is not None
        lasting = [self._lasting(client) for client, rows in enumerate(self.parts) if len(rows)]
        different = lasting if any(lasting) else [{}]  # where clients keep nothing, all have one model
        return self._hits(
            judged,
            (self.method, [{**self.method.tailor(shared, last), **own} for own in different]),
            (self.for_new, [{**self.for_new.tailor(shared, last), **own} for own in different]),
        )

    def judge_sets_zero_shot(self, judged: Judged) -> Hits:
        """Return the same of the pretrained model."""
        assert self.for_new is not None
        base, new = (ZeroShot(Options(), method.task) for method in (self.method, self.for_new))
        return self._hits(judged, (base, [{}]), (new, [{}]))

    def _hits(self, judged: Judged, base: Models, new: Models) -> Hits:
        assert self.new is not None
        labels = self.test.labels.cpu().numpy()
        owner = np.full(len(labels), -1)
        local = np.zeros(len(labels))
        among_base = all_right(*base, self.test, self.batch_size)
        # One model for all, or one for each client that has images, in their order.
        models = iter(np.broadcast_to(among_base, (sum(map(bool, map(len, self.parts))), len(labels))))
        for client, rows in enumerate(self.parts):
            if len(rows):
                own = rows.cpu().numpy()
                owner[own], local[own] = client, next(models)[own]
        return Hits(
            owner,
            (judged.answers == labels).astype(float),
            local,
            among_base.mean(0),
            all_right(*new, self.new, self.batch_size).mean(0),
        )

    def _lasting(self, client: int) -> Tensors:
        """Return what a client's model has of its own; what follows from its data is left out."""
        role = self.method.role
        return {name: tensor for name, tensor in self.private_of(client).items() if role.private(name).lasts}

    def _judge(self, method: Method, tensors_of: Callable[[int], Tensors], for_all: Tensors) -> Judged:
        classes = len(method.task.class_names)
        if not self.parts:
            found = predict_classes(method, for_all, self.test, self.batch_size, temperature=self.temperature)
            matrix = confusion_matrix(self.test.labels.cpu().numpy(), found.classes, classes)
            return Judged(matrix, summary(matrix), *found)
        found = personal_answers(
            method, tensors_of, self.test, self.parts, self.batch_size, self.candidates, self.temperature
        )
        matrices = personal_confusions(self.test, self.parts, found.classes, classes)
        return Judged(np.sum(matrices, axis=0), personal_figures(matrices), *found)
