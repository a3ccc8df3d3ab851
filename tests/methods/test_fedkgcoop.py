"""fedkgcoop: the pull towards the templates' texts by hand, and new classes that stay where they were."""

from typing import Any

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.prompts import gradient
from helpers.runs import run
from helpers.small import batch_of, small_method, small_samples

from fedvl.errors import FedVLError
from fedvl.runs.settings import resolve_experiment


def test_a_bad_option_is_refused():
    with pytest.raises(FedVLError, match=r"method\.pull"):
        resolve_experiment({"method": {"name": "fedkgcoop", "pull": -1}})


def test_the_distance_is_twice_one_minus_the_cosine_of_unit_texts():
    method = small_method("fedkgcoop")
    texts = torch.nn.functional.normalize(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), dim=-1)
    by_cosine = 2 * (1 - (texts * method.task.text_features).sum(-1)).mean()
    torch.testing.assert_close(method.distance(texts), by_cosine)
    assert float(method.distance(method.task.text_features)) == 0


def test_the_loss_is_promptfls_and_the_pull():
    plain, pulled = small_method("promptfl", words="a photo of a"), small_method("fedkgcoop", pull=3.0)
    tensors = plain.start(torch.Generator().manual_seed(0))
    assert torch.equal(tensors["context"], pulled.start(torch.Generator().manual_seed(0))["context"])
    batch = batch_of(small_samples(plain, 5), tensors)
    extra = pulled.objective(tensors, batch)[0] - plain.objective(tensors, batch)[0]
    texts = plain.texts.features(tensors["context"])
    torch.testing.assert_close(extra, 3 * (texts - plain.task.text_features).pow(2).sum(1).mean())
    alone = small_method("fedkgcoop", pull=0.0)
    torch.testing.assert_close(gradient(alone, tensors, batch, "context"), gradient(plain, tensors, batch, "context"))
    assert not torch.allclose(gradient(pulled, tensors, batch, "context"), gradient(plain, tensors, batch, "context"))


def test_released_code_pulls_half_as_much():
    assert resolve_experiment({"method": {"name": "fedkgcoop"}}).method.options["pull"] == 8
    released = resolve_experiment({"method": {"name": "fedkgcoop", "preset": "released"}})
    assert released.method.options["pull"] == 4


def test_the_pull_keeps_texts_near_on_real_images():
    def trained(pull):
        finished = run(
            {
                "method": {"name": "fedkgcoop", "pull": pull},
                "data": {"clients": 3, "shots": 8, "partition": "iid", "test_shots": 10},
                "federation": {"rounds": 8},
                "training": {"learning_rate": 0.03},
            }
        )
        method: Any = finished.prepared.method
        context = finished.federation.shared["context"]
        return float(method.distance(method.texts.features(context)))

    assert trained(8.0) < 0.8 * trained(0.0)


def test_it_declares_what_the_table_says():
    assert_declared("fedkgcoop")
