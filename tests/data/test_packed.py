"""What a pack has of a dataset and model gives the inputs of the originals."""

import numpy as np
import pytest
import torch

from fedvl.config import DataConfig
from fedvl.data.packed import PackedEncoder, PackedSplit, differing, open_packed, pack_source, smallest
from fedvl.data.sources import Opener
from fedvl.errors import FedVLError

OPENER = Opener.once()


@pytest.fixture(scope="module")
def packed():
    return pack_source(DataConfig(), "fedvl-tiny", ["default"], OPENER)


def test_a_packed_split_has_the_rows_labels_and_identity_of_the_original(packed):
    dataset, original = open_packed([packed]).dataset_of(DataConfig()), OPENER.dataset_of(DataConfig())
    for name in ("train", "test"):
        ours, theirs = dataset.splits[name], original.splits[name]
        assert isinstance(ours, PackedSplit)
        assert ours.identity == theirs.identity
        assert np.array_equal(ours.labels, theirs.labels)
        assert torch.equal(ours.carried("features").tensor, packed[1][f"features/{name}"].float())
    test = dataset.splits["test"]
    assert isinstance(test, PackedSplit)
    with pytest.raises(FedVLError, match="the pixels of images, which a pack does not have"):
        test.carried("pixels")
    with pytest.raises(FedVLError, match="has no features of 'emoji-mini'"):
        open_packed([packed]).dataset_of(DataConfig(dataset="emoji-mini"))
    with pytest.raises(FedVLError, match="needs the images of 'emoji-mini'"):
        open_packed([packed]).dataset("emoji-mini", None)


def test_features_are_written_in_16_bits_where_these_hold_all_of_them():
    assert smallest(torch.tensor([[0.5, 0.25]])).dtype == torch.float16
    assert smallest(torch.tensor([[0.1, 0.25]])).dtype == torch.float32


def test_another_model_has_texts_by_templates_and_no_tower(packed):
    source, tensors = packed
    other = source.model_copy(update={"model": "other", "fingerprint": "1" * 64})
    opener = open_packed([(other, tensors)])
    encoder = opener.model("other", "cpu")
    assert isinstance(encoder, PackedEncoder)
    names, templates = source.class_names, source.templates["default"]
    assert torch.equal(encoder.embed_names(names[1:3], templates), tensors["texts/default"][1:3])
    with pytest.raises(FedVLError, match="no text of the class 'cat' in these templates"):
        encoder.embed_names(["cat"], ["{}"])
    with pytest.raises(FedVLError, match="needs the text tower of 'other', which a pack does not have"):
        encoder.tokenise(["cat"])
    with pytest.raises(FedVLError, match="no features of the model 'fedvl-tiny'"):
        opener.model("fedvl-tiny", "cpu")
    with pytest.raises(FedVLError, match="are not of 'other' as it is here"):
        open_packed([(other, tensors), packed])
    with pytest.raises(FedVLError, match="do not fit its classes"):
        open_packed([(other, {**tensors, "texts/default": torch.zeros(2, 3)})])


def test_features_of_an_embedded_model_are_of_its_weights_as_they_are_here(packed):
    source, tensors = packed
    with pytest.raises(FedVLError, match="are not of 'fedvl-tiny' as it is here"):
        open_packed([(source.model_copy(update={"fingerprint": "1" * 64}), tensors)])


def test_features_of_an_embedded_set_are_compared_and_those_of_others_are_not(packed):
    source, tensors = packed
    assert differing(source, tensors, OPENER) == ""
    changed = {**tensors, "features/train": tensors["features/train"] * 2}
    assert differing(source, changed, OPENER) == "the train features or labels are not those of cifar10-mini"
    assert differing(source.model_copy(update={"dataset": "photos"}), changed, OPENER) is None
