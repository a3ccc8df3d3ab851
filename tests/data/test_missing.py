"""Which samples lack what."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedvl.data.missing import LabelNoise, conditions_of, draw_present, lacking, parse_missing, with_wrong_labels
from fedvl.errors import FedVLError

ALL = np.ones(100, dtype=bool)


@pytest.mark.parametrize(
    "spec, without_text, without_image", [("text:0.7", 70, 0), ("image:0.7", 0, 70), ("both:0.7", 35, 35), (None, 0, 0)]
)
def test_the_share_is_exact_and_no_sample_lacks_both(spec, without_text, without_image):
    present = draw_present(ALL, spec, seed=3, purpose="train")
    assert (~present).sum(0).tolist() == [without_text, without_image]
    assert present.any(1).all()


def test_the_draw_depends_on_seed_purpose_and_specification_alone():
    first = draw_present(ALL, "both:0.5", 1, "train")
    assert np.array_equal(first, draw_present(ALL, "both:0.5", 1, "train"))
    for other in (draw_present(ALL, "both:0.5", 2, "train"), draw_present(ALL, "both:0.5", 1, "test")):
        assert not np.array_equal(first, other)


def test_by_client_every_client_lacks_the_share():
    clients = [np.arange(0, 10), np.arange(10, 40), np.arange(40, 100)]
    present = draw_present(ALL, "text:0.5", 0, "train", clients)
    assert [int((~present[rows, 0]).sum()) for rows in clients] == [5, 15, 30]


def test_by_whole_clients_the_share_is_of_clients_who_miss_it_in_every_sample():
    clients = np.split(np.arange(100), 10)
    present = draw_present(ALL, "both:0.6", 0, "train", clients, whole=True)
    kinds = [tuple(np.unique(present[rows], axis=0).tolist()) for rows in clients]
    assert all(len(kind) == 1 for kind in kinds)
    found = [kind[0] for kind in kinds]
    assert [found.count(kind) for kind in ([False, True], [True, False], [True, True])] == [3, 3, 4]
    for spec, column in (("text:0.6", 0), ("image:0.6", 1)):
        missing = ~draw_present(ALL, spec, 0, "train", clients, whole=True)
        assert [bool(missing[rows, column].all()) for rows in clients].count(True) == 6
        assert missing.sum() == 60


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.sampled_from(["text", "image", "both"]), st.floats(0, 1))
def test_a_sample_without_a_text_keeps_its_image(texts, pattern, rate):
    present = draw_present(np.array(texts), f"{pattern}:{rate}", 0, "train")
    assert present.any(1).all()
    assert not present[~np.array(texts), 0].any()


def test_the_seven_conditions():
    assert list(conditions_of("text:0.6").items()) == [
        ("as trained", "text:0.6"),
        ("miss-text", "text:0.6"),
        ("miss-image", "image:0.6"),
        ("miss-both", "both:0.6"),
        ("full", None),
        ("text-only", "image:1"),
        ("image-only", "text:1"),
    ]


def test_as_trained_is_drawn_as_its_namesake():
    found = {name: draw_present(ALL, spec, 0, "test") for name, spec in conditions_of("both:0.7").items()}
    assert np.array_equal(found["as trained"], found["miss-both"])
    assert found["text-only"].tolist() == [[True, False]] * 100
    assert found["image-only"].tolist() == [[False, True]] * 100


def test_an_absent_text_is_the_empty_text_and_an_absent_image_is_marked():
    inputs = {"tokens": torch.tensor([[1, 5, 2], [1, 6, 2]]), "pixels": torch.zeros(2, 3, 1, 1, dtype=torch.uint8)}
    found = lacking(inputs, np.array([[False, True], [True, False]]), torch.tensor([[1, 2, 0]]))
    assert found["tokens"].tolist() == [[1, 2, 0], [1, 6, 2]]
    assert found["present"].tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("spec", ["", "both", "text:1.5", "image:-1", "sound:0.5", "text:nan", "both:x"])
def test_a_wrong_specification_is_one_sentence(spec):
    with pytest.raises(FedVLError, match=r"text:RATE, image:RATE or both:RATE"):
        parse_missing(spec)


LABELS = np.tile(np.arange(4), 50)
CLIENTS = [np.arange(40), np.arange(40, 150), np.arange(150, 150)]


def noisy(text: str, seed: int = 0) -> np.ndarray:
    return with_wrong_labels(LABELS, CLIENTS, 4, LabelNoise.parse(text), seed)


@pytest.mark.parametrize("kind", ["symmetric", "pair"])
def test_a_share_of_each_client_is_wrong_and_nobody_else(kind: str) -> None:
    changed = noisy(f"{kind}:0.4") != LABELS
    assert [int(changed[rows].sum()) for rows in CLIENTS] == [16, 44, 0]
    assert not changed[150:].any()
    assert not np.array_equal(noisy(f"{kind}:0.4"), noisy(f"{kind}:0.4", seed=1))


def test_a_pair_is_the_next_class_and_symmetric_noise_any_other() -> None:
    steps = {kind: (noisy(f"{kind}:1") - LABELS)[:150] % 4 for kind in ("pair", "symmetric")}
    assert set(steps["pair"]) == {1}
    assert set(steps["symmetric"]) == {1, 2, 3}
    assert np.allclose(np.bincount(steps["symmetric"])[1:], 50, atol=25)


def test_unknown_labels_stay_unknown() -> None:
    labels = np.array([0, -1, 1, -1])
    found = with_wrong_labels(labels, [np.arange(4)], 2, LabelNoise.parse("symmetric:1"), 0)
    assert found.tolist() == [1, -1, 0, -1]


@pytest.mark.parametrize("text", ["symmetric", "pair:1.2", "other:0.1", "symmetric:nan", "pair:x"])
def test_other_noise_is_refused(text: str) -> None:
    with pytest.raises(FedVLError, match="use symmetric:SHARE or pair:SHARE"):
        LabelNoise.parse(text)
