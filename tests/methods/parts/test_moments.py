"""Second moments: packed and unpacked, of parts and of the whole, and against formulas on samples."""

import pytest
import torch
from helpers.small import labelled_rows
from hypothesis import given
from hypothesis import strategies as st

from fedvl.methods.parts.moments import Moments, indicators, moment_roles, moments_of, packed, unit_rows, unpacked


def test_a_triangle_by_hand():
    gram = torch.tensor([[1.0, 2.0], [2.0, 5.0]]).double()
    vector = packed(gram)
    torch.testing.assert_close(vector, torch.tensor([1.0, 2 * 2**0.5, 5.0]).double())
    torch.testing.assert_close(unpacked(vector, 2), gram)


@given(width=st.integers(1, 7), seed=st.integers(0, 99))
def test_packing_keeps_the_matrix_and_its_norm(width, seed):
    rows, _ = labelled_rows(9, width, 2, seed)
    gram = rows.T @ rows
    torch.testing.assert_close(unpacked(packed(gram), width), gram, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(packed(gram).norm(), gram.norm())


def test_rows_in_single_precision_become_unit_vectors_in_double():
    rows = unit_rows(torch.tensor([[3.0, 4.0], [0.1, 0.2]]))
    assert rows[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-15)
    assert float((rows.norm(dim=1) - 1).abs().max()) < 1e-15


def test_a_label_of_minus_one_leaves_its_sample_out():
    rows, labels = labelled_rows(6, 3, 2, 0)
    hidden = labels.clone()
    hidden[2] = -1
    kept = torch.arange(6) != 2
    found, wanted = moments_of(rows, indicators(hidden, 2)), moments_of(rows[kept], indicators(labels[kept], 2))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor)


def test_each_sample_adds_the_norm_that_its_role_declares():
    rows, labels = labelled_rows(5, 4, 3, 1)
    for row in range(5):
        found = moments_of(rows[row : row + 1], indicators(labels[row : row + 1], 3))
        for name, role in moment_roles(4, 3).items():
            assert found[name].shape == role.shape
            torch.testing.assert_close(found[name].norm(), torch.tensor(role.norm).double())


def test_what_follows_from_the_sums_is_what_follows_from_the_samples():
    rows, labels = labelled_rows(40, 5, 3, 2)
    moments = Moments.of(moments_of(rows, indicators(labels, 3)))
    centred, targets = rows - rows.mean(0), indicators(labels, 3)
    torch.testing.assert_close(moments.centred_gram, centred.T @ centred)
    torch.testing.assert_close(moments.centred_cross, centred.T @ (targets - targets.mean(0)))
    means = torch.stack([rows[labels == c].mean(0) for c in range(3)], 1)
    torch.testing.assert_close(moments.class_means, means)
    apart = rows - means.T[labels]
    torch.testing.assert_close(moments.within, apart.T @ apart)
    assert float(moments.count) == 40


def test_a_class_without_samples_has_the_mean_of_all():
    rows, labels = labelled_rows(10, 4, 2, 3)
    moments = Moments.of(moments_of(rows, indicators(labels, 3)))
    torch.testing.assert_close(moments.class_means[:, 2], rows.mean(0))
