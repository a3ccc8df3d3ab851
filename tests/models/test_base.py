"""What all encoders have: a fingerprint of what decides their features, and their own preprocessing."""

import copy
from typing import Any

import torch
from helpers.small import small_encoder
from PIL import Image

from fedvl.models.base import FrozenEncoder
from fedvl.models.preprocessing import Preprocessing


def encoder() -> Any:
    return copy.deepcopy(small_encoder())


def test_a_fingerprint_is_of_shape_preprocessing_weights_and_precision() -> None:
    first = encoder()
    assert len(first.fingerprint) == 64
    assert encoder().fingerprint == first.fingerprint
    weights = encoder()
    weights.log_scale.add_(0.5)
    other = type(first)("small", first.shape, Preprocessing(64, 64, mean=(0.5, 0.5, 0.5)), first.tokenizer)
    other.load_state_dict(first.state_dict())
    same = type(first)("other name", first.shape, first.preprocessing, first.tokenizer)
    same.load_state_dict(first.state_dict())
    half = first.encoding_in("float16")
    found = [each.fingerprint for each in (first, weights, other, half)]
    assert len(set(found)) == 4
    assert same.fingerprint == first.fingerprint, "a name decides no feature"


def test_an_encoder_in_another_precision_shares_weights_and_leaves_the_first_alone() -> None:
    first = encoder()
    known = first.fingerprint
    other = first.encoding_in("float16")
    assert (first.encoding, other.encoding) == ("float32", "float16")
    assert other.log_scale is first.log_scale
    assert other.fingerprint != first.fingerprint == known
    assert other.encoding_in("float32").fingerprint == known


def test_images_and_texts_go_through_the_encoders_own_preprocessing_and_tokenizer() -> None:
    first = encoder()
    assert isinstance(first, FrozenEncoder)
    pixels = first.preprocess(Image.new("RGB", (90, 70), (255, 0, 51)))
    assert (pixels.shape, pixels.dtype) == ((3, 64, 64), torch.uint8)
    assert pixels[:, 5, 5].tolist() == [255, 0, 51]
    mean, std = torch.tensor(first.preprocessing.mean), torch.tensor(first.preprocessing.std)
    expected = (torch.tensor([1.0, 0.0, 0.2]) - mean) / std
    plain = FrozenEncoder.normalise(first, pixels[None])[0, :, 5, 5]
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-6)
    tokens = first.tokenise(["a dog", "a very large dog"])
    assert tokens.shape[0] == 2
    assert torch.equal(tokens, first.tokenizer(["a dog", "a very large dog"]))
