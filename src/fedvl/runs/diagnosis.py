"""What the first step of a method shows of tensors that are not trained though they should be."""

from collections.abc import Collection

import torch

from fedvl.federation.local import LocalEngine
from fedvl.methods.base import Batch, Method
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors


def first_step_faults(method: Method, engine: LocalEngine) -> list[str]:
    """Return what is wrong with the first step of the client with most images, in sentences."""
    if method.role.statistics or not any(engine.rows.counts):
        return []
    shared, _ = method.role.split(method.start(torch_generator(engine.seed, "start")))
    client = engine.rows.counts.index(max(engine.rows.counts))
    handed = method.hand_out(shared, {}, client)
    step = engine.first_step(client, handed)
    return [] if step is None else [f"{fault}." for fault in untrained_faults(method, handed, *step)]


def untrained_faults(method: Method, handed: Collection[str], tensors: Tensors, batch: Batch) -> list[str]:
    """Return tensors that the loss depends on and nothing trains, or that no gradient moves.

    A private tensor without a role is one that the author forgot; with a role, it is meant to stay.
    """
    role = method.role
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items() if t.is_floating_point()}
    loss, _ = method.objective({**tensors, **leaves}, batch)
    found = (
        torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        if loss.requires_grad
        else [None] * len(leaves)
    )
    moved = {name for name, slope in zip(leaves, found, strict=True) if slope is not None and bool(slope.any())}
    trained = [
        name
        for name in leaves
        if name not in role.given and (role.shared(name).trained if name in handed else role.private(name).trained)
    ]
    forgotten = sorted(name for name in moved if name not in handed and not role.declares(name))
    faults = [
        f"{name!r} takes part in the loss, but nothing trains it: give it the role Private(trained=True), or Private() if it is "
        "to stay as join returns it"
        for name in forgotten
    ]
    if trained and not moved.intersection(trained):
        listed = ", ".join(repr(name) for name in trained)
        faults.append(
            f"The gradient of the loss is 0 for every trained tensor ({listed}), so that nothing moves: the loss must depend "
            "on them, without detach"
        )
    return faults
