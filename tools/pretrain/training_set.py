"""What the training scripts read: images, labels and text as tensors, and how often each image is drawn."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tools.pretrain.images import channels_first, load_shards
from tools.pretrain.teachers import embed_strings

# Share of the labelled images of a batch that each source gets.
SOURCE_SHARES = {
    "tiny-imagenet": 0.78,
    "one-per-class": 0.025,
    "cal": 0.07,
    "cub": 0.035,
    "car": 0.05,
    "fru": 0.03,
    "none": 0.01,
}
ONE_PER_CLASS_AT_MOST = 5  # images of a WordNet class that Tiny-ImageNet does not have
NARROW_AT_MOST = 12  # ImageNet classes below a concept that is still narrow
TAXONOMY_WIDTH = 192
TAXONOMY_WEIGHT = 0.8
RARE = 1e-4  # priors are not taken to be smaller than this


class Arrays:
    """The arrays of text.npz as tensors on the training device."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._content, self._device = np.load(folder / "text.npz"), device

    def tensor(self, name: str, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(self._content[name])).to(self._device, dtype)

    def number(self, name: str) -> int:
        return int(self._content[name])


@dataclass
class TrainingSet:
    """Images (n x 3 x 64 x 64 uint8) with the row of their label and of their captions; -1 where there is none."""

    arrays: Arrays
    images: torch.Tensor
    key: torch.Tensor  # position in key_names
    key_names: list[str]
    label: torch.Tensor
    caption: torch.Tensor
    concept_tokens: torch.Tensor
    caption_tokens: torch.Tensor
    leaf: torch.Tensor  # of each label row: its own concept
    start: int
    end: int
    vocabulary: int


def load_training_set(shards: Path, text: Path, cache: Path | None, device: torch.device) -> TrainingSet:
    arrays = Arrays(text, device)
    pixels, keys = load_shards(shards, cache)
    key = torch.from_numpy(keys).to(device).long()
    return TrainingSet(
        arrays,
        images=channels_first(pixels, device),
        key=key,
        key_names=json.loads((text / "keys.json").read_text()),
        label=arrays.tensor("key_label")[key],
        caption=arrays.tensor("key_caption")[key],
        concept_tokens=arrays.tensor("concept_tokens", torch.int32),
        caption_tokens=arrays.tensor("caption_tokens", torch.int32),
        leaf=arrays.tensor("leaf"),
        start=arrays.number("start"),
        end=arrays.number("end"),
        vocabulary=arrays.number("vocabulary"),
    )


@dataclass
class Targets:
    """What is true of each label (rows; the last row is for images without a label) among the concepts (columns)."""

    true: torch.Tensor  # the label's concept and its ancestors
    weight: torch.Tensor  # of each as a positive: half for the label itself, half shared by all that is true of it
    not_negative: torch.Tensor  # true, or may well be true


def label_targets(true: torch.Tensor, leaf: torch.Tensor, class_ancestor: torch.Tensor) -> Targets:
    """`class_ancestor`: ImageNet classes x concepts, what each class is a kind of (itself included).

    A label of another set may well be an ImageNet class too (a Caltech "chair" a "rocking chair"): ImageNet classes
    below a narrow concept that is true of such a label are left out of its negatives.
    """
    labels, concepts = true.shape
    classes = class_ancestor.shape[0]
    weight = true.float()
    weight = 0.5 * weight / weight.sum(1, keepdim=True).clamp(min=1)
    weight[torch.arange(labels, device=true.device), leaf] += 0.5
    ancestor = class_ancestor.float()
    narrow = (ancestor.sum(0) <= NARROW_AT_MOST).float()
    possible = torch.zeros_like(true)
    possible[:, :classes] = ((true.float() * narrow) @ ancestor.T > 0) & (leaf >= classes)[:, None]

    def with_no_label(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows, torch.zeros(1, concepts, dtype=rows.dtype, device=rows.device)])

    return Targets(with_no_label(true), with_no_label(weight), with_no_label(true | possible))


def sampling_weights(label: torch.Tensor, key: torch.Tensor, key_names: list[str]) -> torch.Tensor:
    """How often each labelled image is drawn: a fixed share a source, within it by label count to the power -1/2.

    `label` and `key` are those of the labelled images alone.
    """
    order = list(SOURCE_SHARES)
    count = torch.bincount(key, minlength=len(key_names)).tolist()

    def source(number: int, name: str) -> int:
        tag = name.partition(":")[0]
        if tag == "wn":
            tag = "one-per-class" if count[number] <= ONE_PER_CLASS_AT_MOST else "tiny-imagenet"
        return order.index(tag if tag in SOURCE_SHARES else "none")

    sources = torch.tensor([source(*named) for named in enumerate(key_names)], device=label.device)[key]
    share = torch.tensor(list(SOURCE_SHARES.values()), device=label.device)
    weight = torch.bincount(label).float()[label].pow(-0.5)
    total = torch.zeros(len(order), device=label.device).index_add_(0, sources, weight).clamp(min=1e-9)
    return weight / total[sources] * share[sources]


def log_prior(label: torch.Tensor, sampling: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logarithm of how often each concept is a positive under this sampling, less its mean."""
    drawn = torch.zeros(len(weight), device=label.device).index_add_(0, label, sampling / sampling.sum())
    logarithm = (drawn @ weight).clamp(min=RARE).log()
    return logarithm - logarithm.mean()


def taxonomy_vectors(start: torch.Tensor, ancestor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """A vector for each synset: random projection of its set of ancestors, each weighted by its information content.

    Synset i has the ancestors `ancestor[start[i]:start[i + 1]]`. The last row is zero, for "no synset" (-1).
    """
    directions = torch.randn(len(content), TAXONOMY_WIDTH, generator=torch.Generator().manual_seed(1))
    directions = directions.to(content.device) * content[:, None]
    row = torch.repeat_interleave(torch.arange(len(content), device=content.device), start[1:] - start[:-1])
    vectors = torch.zeros_like(directions).index_add_(0, row, directions[ancestor])
    vectors = F.normalize(vectors - vectors.mean(0), dim=1)
    return torch.cat([vectors, vectors.new_zeros(1, TAXONOMY_WIDTH)])


@dataclass
class Meanings:
    """Semantic target vectors, normalised: the sentence teacher's embedding beside the taxonomy vector."""

    concept: torch.Tensor
    item: torch.Tensor
    caption: torch.Tensor


def load_meanings(
    arrays: Arrays, text: Path, sentence_teacher: Path, cache: Path | None, device: torch.device
) -> Meanings:
    with gzip.open(text / "strings.json.gz", "rt") as file:
        strings = json.load(file)
    sentence = embed_strings(strings, sentence_teacher, device, cache)
    taxonomy = taxonomy_vectors(
        arrays.tensor("synset_start"), arrays.tensor("synset_ancestor"), arrays.tensor("synset_content", torch.float32)
    )

    def both(name: str) -> torch.Tensor:
        pair = sentence[arrays.tensor(f"{name}_first")] + sentence[arrays.tensor(f"{name}_second")]
        return F.normalize(pair, dim=1)

    concept, item, caption = both("concept"), both("item"), sentence[arrays.tensor("caption_string")]
    common = item[: arrays.number("nouns")].mean(0, keepdim=True)  # what all words share says nothing of any of them

    def joined(embedding: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        centred = F.normalize(embedding - common, dim=-1)
        return F.normalize(torch.cat([centred, TAXONOMY_WEIGHT * kind], -1), dim=-1)

    return Meanings(
        concept=joined(concept, taxonomy[arrays.tensor("concept_synset")]),
        item=joined(item, taxonomy[arrays.tensor("item_synset")]),
        caption=joined(caption, taxonomy.new_zeros(*caption.shape[:-1], TAXONOMY_WIDTH)),
    )
