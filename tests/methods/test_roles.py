"""Roles are found by name, then by pattern, and only of the kind that is asked for."""

import torch

from fedvl.methods.roles import Given, Private, Remembered, Roles, Sent, Server, Shared


def test_what_is_not_declared_has_the_defaults():
    roles = Roles({})
    assert roles.shared("w") == Shared(trained=True, rate=1.0, needs="sum")
    assert roles.private("own") == Private(trained=False, rate=1.0, per_sample=False, lasts=True)
    assert (roles.sent, roles.given, roles.remembers, roles.renews_private) == ({}, {}, False, False)


def test_a_name_wins_over_a_pattern_and_kinds_are_kept_apart():
    roles = Roles(
        {"*": Shared(needs="last"), "bn.*": Shared(trained=False), "bn.w": Shared(rate=2.0), "own": Private(True)}
    )
    assert roles.shared("bn.w").rate == 2.0
    assert roles.shared("bn.mean").needs == "last"  # of patterns, the first
    assert roles.private("bn.w") == Private()
    assert roles.private("own").trained
    assert roles.shared("own").needs == "last"  # a shared tensor of that name would be one of "*"


def test_what_travels_follows_from_the_roles():
    roles = Roles(
        {
            "extra": Sent(lambda name, tensors, received, samples: tensors["w"], (None, 2), needs="last"),
            "goal": Given((3,)),
            "memory": Remembered(),
            "rows": Private(per_sample=True),
            "short": Private(trained=True, lasts=False),
        }
    )
    assert roles.needs("extra") == "last"
    assert roles.needs("w") == "sum"
    assert roles.sent_shapes == {"extra": (None, 2)}
    assert roles.given == {"goal": (3,)}
    assert roles.remembers
    assert roles.per_sample == {"rows"}
    assert roles.trained_private == ["short"]
    assert roles.renews_private


def test_a_function_of_a_pattern_makes_every_tensor_that_fits_and_one_of_a_name_makes_it_new():
    def make(name, tensors, received, samples):
        return name

    roles = Roles(
        {
            "c.*": Shared(trained=False, end=make),
            "own.*": Private(begin=make, end=make),
            "new": Private(lasts=False, begin=make),
            "sent": Sent(make, ()),
        }
    )
    assert roles.has_ends
    assert roles.has_begins
    assert roles.begins(["own.w", "other"]).keys() == {"new", "own.w"}
    assert roles.ends(["c.w", "w"], ["own.w", "other"]).keys() == {"sent", "c.w", "own.w"}
    assert not Roles({"w": Shared(), "own": Private()}).has_ends
    assert not Roles({"own": Private()}).has_begins


def test_start_is_split_into_what_is_handed_out_and_what_stays_on_the_server():
    start = {name: torch.zeros(1) for name in ("w", "h.w", "b", "h.b")}
    shared, server = Roles({"h.*": Server(), "*": Shared(needs="last")}).split(start)
    assert list(shared) == ["w", "b"]
    assert list(server) == ["h.w", "h.b"]
    assert server["h.w"] is start["h.w"]
