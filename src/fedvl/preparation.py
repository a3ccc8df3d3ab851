"""Everything that a run needs before its first round: images -> features -> clients, class texts and the method."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import normalize, pad

from fedvl.config import Experiment
from fedvl.data.inputs import domains_of, read_forms
from fedvl.data.missing import conditions_of, draw_present, lacking
from fedvl.data.partition import few_shot
from fedvl.data.protocols import PROTOCOLS, Labels, number_domains
from fedvl.data.sources import open_dataset
from fedvl.data.stores import Dataset
from fedvl.errors import FedVLError
from fedvl.evaluation.metrics import confusion_matrix, summary
from fedvl.evaluation.personal import personal_answers, personal_confusions, personal_figures
from fedvl.evaluation.predict import classify
from fedvl.federation.local import LABELS, LocalEngine
from fedvl.methods import load_method
from fedvl.methods.base import Method, Options, Samples, Task
from fedvl.methods.parts.pseudo_labels import label_figures, relabelled
from fedvl.methods.zero_shot import ZeroShot
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.models.vilt import FusedEncoder
from fedvl.tensors import ByClient, Tensors

TEXTS_AT_ONCE = 256
MOST_CLASSES = 10_000  # results count every pair of classes: 800 MB for each matrix of so many


class Display(Protocol):
    """Where progress is shown."""

    def stage(self, name: str) -> Callable[[int, int], None]: ...

    def rounds(
        self, total: int, records: list[dict[str, Any]], zero_shot_accuracy: float | None
    ) -> Callable[[dict[str, Any]], None]: ...


class Silent:
    """A display that shows nothing."""

    def stage(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: None

    def rounds(self, *ignored: Any) -> Callable[[dict[str, Any]], None]:
        return lambda record: None


class Opener(NamedTuple):
    """How datasets and models are opened; of many runs in one process, each but once."""

    dataset: Callable[[str, Path | None], Dataset] = open_dataset
    model: Callable[[str, str], DualEncoder | FusedEncoder] = load_model

    @classmethod
    def once(cls) -> "Opener":
        return cls(cache(open_dataset), cache(load_model))


OPEN_ANEW = Opener()


class Judged(NamedTuple):
    """How a model answers the test."""

    confusion: NDArray[np.int64]
    figures: dict[str, Any]  # accuracy and further ones, in percent
    answers: NDArray[np.int64]  # the class given to each test row; -1 where nobody asked


@dataclass
class Prepared:
    """Everything in place for the first round."""

    experiment: Experiment
    method: Method
    asked: Method  # the method for the questions' classes; the same as ``method`` in a closed set
    engine: LocalEngine
    test: Samples
    read_test: Callable[[int], Image.Image]  # the image of a row of ``test``
    test_parts: list[torch.Tensor]  # rows of ``test`` that each client asks about; none unless the protocol is personal
    conditions: dict[str, Samples]  # the test under each condition of the missing-modality protocol; none in another
    true_labels: torch.Tensor  # of the training images, to tell how true pseudo-labels are; -1 where there is none
    class_names: list[str]  # of the dataset
    templates: list[str]  # that its class names are put into
    counts: NDArray[np.int64]  # clients x classes of the dataset
    partition_note: str
    skipped: list[dict[str, str]]
    encode_seconds: float
    notes: list[str]

    def judge(self, shared: Tensors, kept: ByClient) -> Judged:
        """How the model that these tensors make answers the test; in the personal protocol, each client's own."""
        tensors = self.asked.tailor(shared, kept)
        return self._judged(self.asked, lambda client: {**tensors, **self._private_of(client)}, tensors)

    def judge_zero_shot(self) -> Judged | None:
        """The pretrained model alone; None for a fused one, which knows no classes before it is trained."""
        if "features" not in self.test.inputs:
            return None
        return self._judged(ZeroShot(Options(), self.asked.task), lambda client: {}, {})

    def judge_conditions(self, shared: Tensors, kept: ByClient) -> list[dict[str, Any]]:
        """Accuracy and macro-F1 under each condition of the missing-modality protocol; conditions alike are asked once."""
        figures = {
            id(samples): replace(self, test=samples).judge(shared, kept).figures
            for samples in {id(samples): samples for samples in self.conditions.values()}.values()
        }
        return [
            {"condition": condition, **{name: figures[id(samples)][name] for name in ("accuracy", "macro_f1")}}
            for condition, samples in self.conditions.items()
        ]

    def trained_private(self) -> Tensors:
        """What a client trains for itself beside the shared tensors."""
        private = self.engine.private_of(max(range(self.engine.clients), key=lambda c: len(self.engine.rows[c])))
        return {name: tensor for name, tensor in private.items() if self.method.role.private(name).trained}

    def label_figures(self) -> dict[str, Any]:
        """How many pseudo-labels are trained on and how many of them are true; nothing where true labels are given."""
        labels, truths = [], []
        for client, rows in enumerate(self.engine.rows):
            made = self.engine.private.get(client, {}).get(LABELS)
            if made is None and self.experiment.data.labels != "true":
                made = self.engine.data.labels[rows]
            if made is not None:
                labels.append(made)
                truths.append(self.true_labels[rows])
        return label_figures(labels, truths) if labels else {}

    def _judged(self, method: Method, tensors_of: Callable[[int], Tensors], for_all: Tensors) -> Judged:
        batch_size, classes = self.experiment.evaluation.batch_size, len(method.task.class_names)
        if not self.test_parts:
            answers = classify(method, for_all, self.test, batch_size)
            matrix = confusion_matrix(self.test.labels.cpu().numpy(), answers, classes)
            return Judged(matrix, summary(matrix), answers)
        answers = personal_answers(method, tensors_of, self.test, self.test_parts, batch_size)
        matrices = personal_confusions(self.test, self.test_parts, answers, classes)
        return Judged(np.sum(matrices, axis=0), personal_figures(matrices), answers)

    def _private_of(self, client: int) -> Tensors:
        return self.engine.private_of(0 if self.method.scope == "pooled" else client)


def prepare(experiment: Experiment, display: Display, opener: Opener = OPEN_ANEW) -> Prepared:
    began = time.perf_counter()
    device = pick_device(experiment.device)
    method_type = load_method(experiment.method.name)
    dataset = opener.dataset(experiment.data.dataset, Path(experiment.data.root) if experiment.data.root else None)
    if len(dataset.class_names) > MOST_CLASSES:
        raise FedVLError(
            f"'{dataset.name}' has {len(dataset.class_names):,} classes, more than {MOST_CLASSES:,}; leave some of them out."
        )
    options = method_type.options_type.model_validate(experiment.method.options)
    inputs = [form for form in method_type.forms(options) if form != "present"]
    encoder = opener.model(experiment.model.name, device)
    fused = isinstance(encoder, FusedEncoder)
    check_model(fused, "tokens" in inputs, experiment)
    # Features for pseudo-labels and for the zero-shot accuracy, whether the method wants them or not
    wanted = inputs if fused else list(dict.fromkeys([*inputs, "features"]))
    read = {
        name: read_forms(name, dataset.splits[name], encoder, wanted, device, display.stage)
        for name in ("train", "test")
    }
    encode_seconds = time.perf_counter() - began
    labels = {name: dataset.splits[name].labels[part.kept] for name, part in read.items()}
    check_labels(dataset, method_type, labels, experiment)
    if experiment.data.test_shots:
        few = few_shot(labels["test"], experiment.data.test_shots, seed=0)  # one test for all seeds
        read["test"], labels["test"] = read["test"].take(few), labels["test"][few]
    protocol = PROTOCOLS[experiment.evaluation.protocol]
    domains = number_domains(*(domains_of(dataset.splits[name], read[name].kept) for name in ("train", "test")))
    known = Labels(labels["train"], labels["test"], len(dataset.class_names), domains)
    deal = protocol(known, experiment.data, experiment.seed)
    train, all_test = (
        Samples({form: read[name].forms[form] for form in forms}, torch.from_numpy(own).to(device))
        for name, forms, own in (
            ("train", inputs, renumbered(labels["train"], deal.trained_classes)),
            ("test", wanted, renumbered(labels["test"], deal.asked_classes)),
        )
    )
    test, conditions = all_test.take(torch.from_numpy(deal.asked).to(device)), dict[str, Samples]()
    if isinstance(encoder, FusedEncoder):
        train, conditions = missing_modalities(train, test, deal.clients, encoder, experiment)
        test = conditions["as trained"]
    target = None
    if method_type.uses_target and len(deal.validation):
        target = all_test.take(torch.from_numpy(deal.validation).to(device)).inputs
    embeddings = embed_classes(dataset, encoder, experiment.data.templates, device)
    method, asked = (
        method_type(
            options,
            Task(
                tuple(dataset.class_names[c] for c in classes),
                embeddings[classes],
                encoder,
                experiment.data.clients,
                experiment.seed,
                protocol=experiment.evaluation.protocol,
                target=target,
                stage=display.stage,
            ),
        )
        for classes in (deal.trained_classes, deal.asked_classes)
    )
    rows = [torch.from_numpy(client).to(device) for client in deal.clients]
    true_labels = train.labels
    if experiment.data.labels != "true":
        train, rows = relabelled(
            train,
            rows,
            read["train"].forms["features"],
            method.task.text_features,
            method.task.clip.logit_scale,
            experiment.data.labels,
            experiment.data.pseudo_shots,
        )
    if method.scope == "pooled":
        rows = [torch.cat(rows).sort().values]
    asked_images = read["test"].kept[deal.asked]
    return Prepared(
        experiment=experiment,
        method=method,
        asked=asked,
        engine=LocalEngine(method, train, rows, experiment.training, experiment.federation, experiment.seed),
        test=test,
        read_test=lambda row: dataset.splits["test"].read(int(asked_images[row])),
        test_parts=[torch.from_numpy(part).to(device) for part in deal.parts],
        conditions=conditions if experiment.evaluation.protocol == "missing" else {},
        true_labels=true_labels,
        class_names=list(dataset.class_names),
        templates=list(dataset.templates.get(experiment.data.templates, ())),
        counts=count_classes(deal.clients, labels["train"], len(dataset.class_names)),
        partition_note=deal.note,
        skipped=[
            {"image": image, "reason": reason, "split": name}
            for name, part in read.items()
            for image, reason in part.bad
        ],
        encode_seconds=encode_seconds,
        notes=[*dataset.notes, *(note for part in read.values() for note in part.notes)],
    )


def missing_modalities(
    train: Samples, test: Samples, clients: list[NDArray[np.int64]], encoder: FusedEncoder, experiment: Experiment
) -> tuple[Samples, dict[str, Samples]]:
    """Training samples that lack what the experiment says, and the test under each of the paper's conditions."""
    data, seed = experiment.data, experiment.seed

    def lack(
        samples: Samples, spec: str | None, purpose: str, groups: list[NDArray[np.int64]] | None = None
    ) -> Samples:
        tokens = samples.inputs["tokens"]
        nothing = encoder.tokenise([""])
        has_text = encoder.text_mask(tokens).sum(1).cpu().numpy() > nothing.shape[1]
        present = draw_present(has_text, spec, seed, purpose, groups)
        padded = pad(nothing, (0, tokens.shape[1] - nothing.shape[1]), value=int(nothing[0, -1]))
        return Samples(lacking(samples.inputs, present, padded), samples.labels)

    train = lack(train, data.missing, "train", clients if data.missing_by == "client" else None)
    asked = conditions_of(data.missing)
    made = {spec: lack(test, spec, "test") for spec in set(asked.values())}
    return train, {name: made[spec] for name, spec in asked.items()}


def check_model(fused: bool, wants_fused: bool, experiment: Experiment) -> None:
    name, model = experiment.method.name, experiment.model.name
    if wants_fused and not fused:
        raise FedVLError(
            f"Method '{name}' needs a fused model, and '{model}' is a CLIP-like one; use --model fedvl-tiny-vilt or a ViLT folder."
        )
    if fused and not wants_fused:
        raise FedVLError(
            f"Method '{name}' needs a CLIP-like model, and '{model}' is a fused one; use --model fedvl-tiny."
        )
    if not fused and (experiment.data.missing or experiment.evaluation.protocol == "missing"):
        raise FedVLError(
            f"Method '{name}' reads images alone, so that nothing can be missing; use fed-prime or fedavg-p."
        )
    if fused and experiment.data.labels != "true":
        raise FedVLError(f"Pseudo-labels need a CLIP-like model; with '{model}' leave data.labels as it is.")


def pick_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise FedVLError(f"Device '{name}' cannot be used on this machine; use --device cpu, or auto.") from error
    return name


def renumbered(labels: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Labels as positions in ``classes``; -1 for one that is not there."""
    position = np.full(max(int(labels.max(initial=0)), int(classes.max())) + 2, -1)
    position[classes] = np.arange(len(classes))
    return position[labels]  # a label of -1 finds the last place, which is -1


def check_labels(
    dataset: Dataset, method: type[Method], labels: dict[str, NDArray[np.int64]], experiment: Experiment
) -> None:
    name, protocol = experiment.method.name, experiment.evaluation.protocol
    if experiment.data.labels != "true" and method.labels == "none":
        raise FedVLError(f"Method '{name}' takes no labels from elsewhere; leave data.labels as it is.")
    if experiment.data.labels == "cpl" and method.labels != "candidates":
        raise FedVLError(
            f"Method '{name}' cannot learn from CPL's several candidates an image; use fpl, cps, or a prompt method."
        )
    if method.labels != "none" and experiment.data.labels == "true" and (labels["train"] < 0).any():
        raise FedVLError(
            f"Method '{name}' needs labels, and some training images of '{dataset.name}' have none; "
            "label them, use --set data.labels=cps, or use fst-cbdg or fedpp."
        )
    if (labels["test"] < 0).any():
        raise FedVLError(
            f"Some test images of '{dataset.name}' have no label, so that no accuracy can be told; label them or leave them out."
        )
    if protocol == "open" and method.vocabulary == "trained":
        raise FedVLError(
            f"Method '{name}' knows only the classes that it was trained on; use --protocol closed, or fed-mp or fedclip."
        )


def count_classes(clients: Sequence[NDArray[np.int64]], labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Images of each class that each client holds; unlabelled ones are not counted."""
    return np.stack([np.bincount(labels[rows][labels[rows] >= 0], minlength=classes) for rows in clients])


def embed_classes(dataset: Dataset, encoder: DualEncoder | FusedEncoder, templates: str, device: str) -> torch.Tensor:
    """One vector a class: the text embedding, or the mean of unit embeddings over several templates; none if fused."""
    if isinstance(encoder, FusedEncoder):
        return torch.empty(len(dataset.class_names), 0, device=device)
    if templates not in dataset.templates:
        raise FedVLError(
            f"Dataset '{dataset.name}' has no templates '{templates}'; it has {', '.join(dataset.templates)}."
        )
    return embed_names(dataset.class_names, dataset.templates[templates], encoder, device)


def embed_names(names: Sequence[str], templates: Sequence[str], encoder: DualEncoder, device: str) -> torch.Tensor:
    """The same for any names; a template has {} where the name goes."""
    sets = []
    for template in templates:
        texts = [template.replace("{}", name) for name in names]
        with torch.no_grad():
            parts = [
                encoder.encode_text(encoder.tokenise(texts[first : first + TEXTS_AT_ONCE]).to(device))
                for first in range(0, len(texts), TEXTS_AT_ONCE)
            ]
        sets.append(torch.cat(parts))
    return sets[0] if len(sets) == 1 else torch.stack([normalize(part, dim=-1) for part in sets]).mean(0)
