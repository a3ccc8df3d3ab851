"""Compare labels with the pretrained model: better than chance, and upright."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch.nn.functional import normalize

from fedvl.data.catalogue import general_templates
from fedvl.data.encoding import Progress, encode_images
from fedvl.data.faults import Fault
from fedvl.data.inputs import embed_names
from fedvl.models.clip import DualEncoder
from fedvl.seeding import numpy_generator
from fedvl.tensors import FloatArray, IntArray

OF_CLASS = 40  # images of a class that are encoded
MIN_IMAGES = 10  # images of a class from which something is said of it
MAX_TURNED = 120  # images that are turned and inverted too
MAX_EXACT_IMAGES = 20  # images up to which ranks are compared without an approximation
AT_ONCE = 32
CHANCE = 0.05  # p from which labels are not confirmed
CERTAIN = 1e-4  # p below which images are said to be turned, inverted or exchanged
WAYS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "turned by 90 degrees to the left": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "turned by 90 degrees to the right": lambda image: image.transpose(Image.Transpose.ROTATE_270),
    "turned upside down": lambda image: image.transpose(Image.Transpose.ROTATE_180),
    "inverted": ImageOps.invert,
}
INVERTED = "inverted"
OF_LABELS, OF_POSITION = ("labels", "exchanged"), ("turned", INVERTED)  # kinds of faults


class Agreement(NamedTuple):
    """What the pretrained model says of labelled images."""

    faults: list[Fault]
    doubtful: list[int]  # rows whose label the model thinks least of
    rows: IntArray  # that were encoded
    right: NDArray[np.bool_]  # whether the model's answer is the label, of each of them
    note: str = ""  # what could not be said, and why


def compare_labels(
    rows: IntArray,
    labels: IntArray,
    class_names: Sequence[str],
    read: Callable[[int], Image.Image],
    encoder: DualEncoder,
    progress: Progress,
) -> Agreement:
    """Compare labels (numbers of classes) of readable rows with the model's answers."""
    from scipy.stats import wilcoxon  # takes half a second to import

    chosen = sample(labels, len(class_names))
    rows, labels = rows[chosen], labels[chosen]
    turned = numpy_generator(0, "turned").permutation(len(rows))[:MAX_TURNED]
    total = len(rows) + len(WAYS) * len(turned)
    device = str(next(encoder.parameters()).device)
    texts = normalize(embed_names(class_names, general_templates()["default"], encoder, device), dim=-1).cpu()

    def logs(which: IntArray, change: Callable[[Image.Image], Image.Image], done: int) -> FloatArray:
        """Return the logarithms of the shares of all classes."""
        found = []
        for first in range(0, len(which), AT_ONCE):
            batch = [encoder.preprocess(change(read(int(row)))) for row in which[first : first + AT_ONCE]]
            features = normalize(encode_images(encoder, "features", batch).float(), dim=-1)
            found.append((encoder.logit_scale * (features @ texts.T)).double().log_softmax(-1))
            progress(done + first + len(batch), total)
        return np.asarray(torch.cat(found))

    upright = logs(rows, lambda image: image, 0)
    own = upright[np.arange(len(rows)), labels]
    faults, note = of_classes(upright, labels, rows, class_names)
    better: dict[str, tuple[float, IntArray]] = {}
    for number, (way, change) in enumerate(WAYS.items()):
        other = logs(rows[turned], change, len(rows) + number * len(turned))
        gain = other[np.arange(len(turned)), labels[turned]] - own[turned]
        if len(gain) >= MIN_IMAGES:
            better[way] = float(wilcoxon(gain, alternative="greater").pvalue), rows[turned][gain > 0]
    if better:
        way, (chance, gained) = min(better.items(), key=lambda each: each[1][0])
        if chance < CERTAIN:  # then the labels cannot be doubted because the model does not confirm them
            faults = [turned_fault(way, gained, len(turned))]
    doubtful = rows[np.argsort(own, kind="stable")]
    return Agreement(faults, doubtful.tolist(), rows, upright.argmax(1) == labels, note)


def turned_fault(way: str, rows: IntArray, tried: int) -> Fault:
    return Fault(
        "inverted" if way == INVERTED else "turned",
        f"The pretrained model agrees better with the labels once images are {way} ({len(rows)} of {tried} that were tried).",
        tuple(rows.tolist()),
    )


def sample(labels: IntArray, classes: int) -> IntArray:
    """Return the places of at most so many images of each class, in order."""
    generator = numpy_generator(0, "check")
    parts = [generator.permutation(np.flatnonzero(labels == number))[:OF_CLASS] for number in range(classes)]
    return np.sort(np.concatenate(parts))


def of_classes(
    logs: FloatArray, labels: IntArray, rows: IntArray, class_names: Sequence[str]
) -> tuple[list[Fault], str]:
    """Return classes that seem exchanged, or whose labels the model confirms no better than chance.

    A share of a class tells its images from others if they rank higher by it (Mann-Whitney). So a
    model that names a class too often or too rarely raises no alarm.
    """
    known = [number for number in range(len(class_names)) if int((labels == number).sum()) >= MIN_IMAGES]
    if len(known) < 2:
        return [], f"Labels were not compared: fewer than two classes have {MIN_IMAGES} images."
    pairs = list(combinations(known, 2))
    exchanged = [
        (one, other)
        for one, other in pairs
        if ranked(logs[:, other] - logs[:, one], labels == one, labels == other) < CERTAIN / len(pairs)
    ]
    taken = {number for pair in exchanged for number in pair}
    faults = [
        Fault(
            "exchanged",
            f"The pretrained model takes most images of {class_names[one]} for {class_names[other]}, and the reverse.",
            tuple(rows[(labels == one) | (labels == other)].tolist()),
        )
        for one, other in exchanged
    ]
    chances = {number: ranked(logs[:, number], labels == number, labels != number) for number in known}
    doubted = [number for number in known if chances[number] > CHANCE and number not in taken]
    if len(doubted) > len(known) / 2:
        return faults, "Labels were not compared: the pretrained model knows too little of these classes."
    faults += [
        Fault(
            "labels",
            f"The pretrained model confirms the label {class_names[number]} no better than chance.",
            tuple(rows[labels == number].tolist()),
        )
        for number in doubted
    ]
    return faults, ""


def ranked(values: FloatArray, inside: NDArray[np.bool_], outside: NDArray[np.bool_]) -> float:
    """Return the chance that values inside rank above those outside as much without a reason."""
    from scipy.stats import mannwhitneyu

    one, other = values[inside], values[outside]
    method = "exact" if max(len(one), len(other)) <= MAX_EXACT_IMAGES else "asymptotic"
    return float(mannwhitneyu(one, other, alternative="greater", method=method).pvalue)
