"""Read the images and texts of a split as the inputs that methods need, with the feature cache."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize, pad

from fedvl.data.features import EncodedSplit, default_cache_dir, encode_split
from fedvl.data.imported import ImportedEncoder
from fedvl.data.stored import StoredRows, fits_in_memory
from fedvl.data.stores import Dataset, Split
from fedvl.errors import FedVLError
from fedvl.models.clip import DualEncoder
from fedvl.models.vilt import FusedEncoder
from fedvl.tensors import Tensors

TEXTS_AT_ONCE = 256
VERBS = {"features": "Encode", "pixels": "Read", "patches": "Encode patches of"}


class Read(NamedTuple):
    """Model inputs of a split: one row for each usable image."""

    forms: Tensors
    kept: NDArray[np.int64]  # indices of those images in the split
    bad: list[tuple[str, str]]  # names of the other images, with the reason
    notes: list[str]

    def take(self, rows: NDArray[np.int64]) -> "Read":
        """Return only the given rows."""
        chosen = torch.from_numpy(rows)
        forms = {name: tensor[chosen.to(tensor.device)] for name, tensor in self.forms.items()}
        return self._replace(forms=forms, kept=self.kept[rows])


def read_forms(
    name: str,
    split: Split,
    encoder: DualEncoder | FusedEncoder | ImportedEncoder,
    wanted: Sequence[str],
    device: str,
    stage: Callable[[str], Callable[[int, int], None]],
) -> Read:
    """Return the inputs named in ``Method.inputs``, except "present".

    An image is usable if the model's main input (features or pixels) can be computed for it.
    """
    if split.parts:
        return joined_reads(
            [read_forms(name, part, encoder, wanted, device, stage) for part in split.parts],
            list(map(len, split.parts)),
        )
    main = "pixels" if isinstance(encoder, FusedEncoder) else "features"
    kinds = [main, *(kind for kind in VERBS if kind in wanted and kind != main)]
    read = {
        kind: encode_split(split, encoder, kind, default_cache_dir(), stage(f"{VERBS[kind]} {name}")) for kind in kinds
    }
    kept = read[main].kept
    forms: Tensors = {}
    for form in wanted:
        if form == "tokens":
            forms[form] = encoder.tokenise(texts_of(split, kept)).to(device)
        else:
            forms[form] = kept_rows(read["features" if form == "embeddings" else form], form, kept, device)
    return Read(forms, kept, read[main].bad, [part.note for part in read.values() if part.note])


def joined_reads(reads: Sequence[Read], sizes: Sequence[int]) -> Read:
    """Join what was read of several datasets, one after the other."""
    firsts = np.cumsum([0, *sizes])
    return Read(
        {form: stacked_rows([read.forms[form][:] for read in reads], form) for form in reads[0].forms},
        np.concatenate([read.kept + first for read, first in zip(reads, firsts, strict=False)]),
        [bad for read in reads for bad in read.bad],
        [note for read in reads for note in read.notes],
    )


def stacked_rows(parts: Sequence[torch.Tensor], form: str) -> torch.Tensor:
    """Return rows of several parts; shorter texts are padded by a token after their end."""
    if form == "tokens":
        longest = max(part.shape[1] for part in parts)
        parts = [pad(part, (0, longest - part.shape[1]), value=int(part[0, -1])) for part in parts]
    return torch.cat(list(parts))


def kept_rows(read: EncodedSplit, form: str, kept: NDArray[np.int64], device: str) -> torch.Tensor:
    """Return the rows of the images that are kept, on the device if they fit, or else on disk."""
    rows, unit = read.rows, form == "features"
    places = np.arange(len(kept)) if len(read.kept) == len(kept) else np.searchsorted(read.kept, kept)
    if isinstance(rows, torch.Tensor):
        found = rows[torch.from_numpy(places)].to(device)
    elif fits_in_memory((chosen := rows.take(places)).bytes_in_memory, device):
        found = chosen.read().to(device)
    else:
        # where a tensor stands it is used as one: by its rows, its length and its width
        return cast("torch.Tensor", StoredRows(chosen, device, unit))
    return normalize(found, dim=-1) if unit else found


def texts_of(split: Split, kept: NDArray[np.int64]) -> list[str]:
    """Return the text of each kept image, empty where it is missing."""
    if split.texts is None:
        raise FedVLError(
            "This method needs a text with each image, but the dataset has none; add a column 'text' or use emoji-mini."
        )
    return [split.texts[index] for index in kept]


def domains_of(split: Split, kept: NDArray[np.int64]) -> list[str] | None:
    return None if split.domains is None else [split.domains[index] for index in kept]


def embed_classes(
    dataset: Dataset, templates: str, encoder: DualEncoder | FusedEncoder | ImportedEncoder, device: str
) -> torch.Tensor:
    """Return one text embedding for each class; of width 0 for a fused encoder."""
    if isinstance(encoder, FusedEncoder):
        return torch.empty(len(dataset.class_names), 0, device=device)
    if isinstance(encoder, ImportedEncoder):
        return encoder.embed_names(dataset.class_names, dataset.templates.get(templates, ())).to(device)
    if templates not in dataset.templates:
        raise FedVLError(
            f"Dataset '{dataset.name}' has no templates '{templates}'; it has {', '.join(dataset.templates)}."
        )
    return embed_names(dataset.class_names, dataset.templates[templates], encoder, device)


def embed_names(names: Sequence[str], templates: Sequence[str], encoder: DualEncoder, device: str) -> torch.Tensor:
    """Return each name's text embedding; over several templates, the mean of unit ones."""
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
