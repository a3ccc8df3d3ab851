"""What is probably the same: class names by their spelling, and images by small copies of them."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedvl.data.catalogue import class_key

COPY_SIDE = 16  # of the small copy of an image, in pixels
MIN_CORRELATION = 0.98  # correlation of small copies from which two images count as the same
MIN_FOR_A_MEAN = 30  # images below which their mean says little
MAX_COMPARED = 30_000  # images: the work grows with their square
COPIES_AT_ONCE = 2048
TYPED = 6  # characters of a word from which one that differs is taken for a mistake
SINGULAR = 3  # characters that are left of a plural
TRANSLITERATED = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "æ": "ae", "ø": "oe", "å": "aa"})

Small = npt.NDArray[np.float32]


def same_names(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of different class names that probably mean the same class."""
    return [(one, other) for one, other in combinations(sorted(set(names)), 2) if probably_same(one, other)]


def probably_same(one: str, other: str) -> bool:
    """Whether two names differ in case, accents, order, plural or one mistyped letter only.

    A longer beginning changes the meaning ("malignant", "non-malignant"), and so does another
    number or short word ("stage 1", "stage 2").
    """
    spellings = [[spelling for spelling in (accented(name), transliterated(name)) if spelling] for name in (one, other)]
    return any(similar_names(left, right) for left in spellings[0] for right in spellings[1])


def accented(name: str) -> str:
    """Return a name in lower case without accents."""
    return "".join(each for each in unicodedata.normalize("NFKD", name.casefold()) if not unicodedata.combining(each))


def transliterated(name: str) -> str:
    """Return a name in lower case as it is typed without umlauts."""
    return accented(unicodedata.normalize("NFC", name.lower()).translate(TRANSLITERATED))


def similar_names(one: str, other: str) -> bool:
    if class_key(one) == class_key(other):
        return True
    left, right = (sorted(re.findall(r"\w+", name.replace("_", " "))) for name in (one, other))
    if len(left) != len(right):
        return False
    different = [(a, b) for a, b in zip(left, right, strict=True) if not (singular(a) & singular(b))]
    return len(different) <= 1 and all(mistyped(a, b) for a, b in different)


def singular(word: str) -> set[str]:
    """Return what a word may be the plural of, and the word."""
    return {word} | {word.removesuffix(ending) for ending in ("s", "es") if len(word) - len(ending) >= SINGULAR}


def mistyped(one: str, other: str) -> bool:
    """Whether two long words differ by one letter that was added, left out, changed or swapped."""
    if re.findall(r"\d", one) != re.findall(r"\d", other) or max(len(one), len(other)) < TYPED:
        return False
    if one[0] != other[0]:  # "normal", "abnormal"
        return False
    start = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if start is None:
        return abs(len(one) - len(other)) <= 1
    rests = {one[start + 1 :] == other[start + 1 :], one[start + 1 :] == other[start:]}
    swapped = one[start + 1 : start + 2] + one[start : start + 1] == other[start : start + 2]
    return True in rests or one[start:] == other[start + 1 :] or (swapped and one[start + 2 :] == other[start + 2 :])


def small_copy(image: Image.Image) -> Small:
    """Return a small copy of an image as one row of numbers."""
    small = image.resize((COPY_SIDE, COPY_SIDE), Image.Resampling.BOX, reducing_gap=2.0)
    return np.asarray(small, np.float32).ravel()


def groups_alike(copies: Small) -> list[list[int]]:
    """Return groups of images whose small copies are the same but for brightness and noise.

    What all images have in common is taken off first: chest films are alike, and not the same.
    """
    if len(copies) < 2:
        return []
    rows = copies - copies.mean(1, keepdims=True)
    if len(rows) >= MIN_FOR_A_MEAN:
        rows = rows - rows.mean(0)
    lengths = np.linalg.norm(rows, axis=1)
    plain = lengths < 1.0  # without any contrast, nothing can be compared
    rows = rows / np.maximum(lengths, 1.0)[:, None]
    rows[plain] = 0
    pairs: list[tuple[int, int]] = []
    for first in range(0, len(rows), COPIES_AT_ONCE):
        correlations = rows[first : first + COPIES_AT_ONCE] @ rows[first:].T
        ones, others = np.nonzero(correlations >= MIN_CORRELATION)
        later = others > ones
        pairs += zip((ones[later] + first).tolist(), (others[later] + first).tolist(), strict=True)
    return joined_groups(pairs)


def groups_equal(keys: Sequence[bytes]) -> list[list[int]]:
    """Return groups of places with the same key."""
    places = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    return [group for group in places.values() if len(group) > 1]


def joined_groups(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Join pairs that have a member in common into sorted groups."""
    leader: dict[int, int] = {}

    def find(place: int) -> int:
        while leader.setdefault(place, place) != place:
            place = leader[place]
        return place

    for one, other in pairs:
        low, high = sorted((find(one), find(other)))
        leader[high] = low
    groups = defaultdict(list)
    for place in sorted(leader):
        groups[find(place)].append(place)
    return list(groups.values())
