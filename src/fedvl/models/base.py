"""The base class of all encoders: name, preprocessing, tokenizer and fingerprint."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Self

from PIL import Image
from torch import Tensor, nn

from fedvl.models.preprocessing import Preprocessing
from fedvl.models.tokenizer import TextTokenizer
from fedvl.tensors import digest

if TYPE_CHECKING:
    from fedvl.models.clip import ClipShape
    from fedvl.models.vilt import ViltShape


class FrozenEncoder(nn.Module):
    """A pretrained model whose parameters are never trained."""

    image_size: int
    encoding = "float32"  # precision of matrix products where images are encoded for the feature cache

    def __init__(
        self, name: str, shape: ClipShape | ViltShape, preprocessing: Preprocessing, tokenizer: TextTokenizer
    ) -> None:
        super().__init__()
        self.name = name
        self.shape = shape
        self.preprocessing = preprocessing
        self.tokenizer = tokenizer
        self._description = json.dumps({"shape": asdict(shape), "preprocessing": asdict(preprocessing)}, sort_keys=True)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of configuration, preprocessing, weights and precision: they decide features."""
        precision = "" if self.encoding == "float32" else self.encoding
        return hashlib.sha256((self._description + digest(self.state_dict()) + precision).encode()).hexdigest()

    def encoding_in(self, precision: str) -> Self:
        """Return this encoder, with the same weights, that encodes images in a precision."""
        other = copy.copy(self)
        other.__dict__.pop("fingerprint", None)
        other.encoding = precision
        return other

    def preprocess(self, image: Image.Image) -> Tensor:
        """Return the image as uint8, 3 x H x W."""
        return self.preprocessing(image)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return the pixels as float32, normalised for `encode_image`.

        pixels: n x 3 x H x W, uint8 in 0..255 or float in 0..1.
        """
        return self.preprocessing.normalise(pixels)

    def tokenise(self, texts: Sequence[str]) -> Tensor:
        """Return n x L token ids, padded after the end token to the longest of these texts."""
        return self.tokenizer(texts)
