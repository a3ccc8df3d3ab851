"""fed-inter: Fed-PRIME with the pool between clients alone."""

from helpers.declarations import assert_declared
from helpers.small import small_method

from fedvl.seeding import torch_generator


def test_it_has_one_pool():
    tensors = small_method("fed-inter").start(torch_generator(0, "start"))
    assert tensors.keys() & {"inter", "intra", "uses"} == {"inter", "uses"}
    assert {key for key in tensors if key.startswith("projection")} == {"projection.inter"}


def test_it_declares_what_the_table_says():
    assert_declared("fed-inter")
