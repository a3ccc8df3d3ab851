import torch

from fedvl.seeding import derived_seed, numpy_generator, torch_generator


def test_streams_differ_by_every_part_of_the_purpose():
    seeds = [
        derived_seed(0),
        derived_seed(1),
        derived_seed(0, "a"),
        derived_seed(0, "b"),
        derived_seed(0, "a", 1),
        derived_seed(0, "a", "1"),
        derived_seed(0, "a", 1, 1),
        derived_seed(0, "a", 11),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_streams_are_fixed_for_ever():
    """A change here would change every published result."""
    assert derived_seed(0, "order", 3, 7) == EXPECTED
    assert (
        torch.rand(1, generator=torch_generator(5, "x")).item()
        == torch.rand(1, generator=torch_generator(5, "x")).item()
    )
    assert numpy_generator(5, "x").random() == numpy_generator(5, "x").random()


EXPECTED = 4502975733693527648  # of SHA-256("0\x1fstr:order\x1fint:3\x1fint:7")
