"""Find out whether a method makes a client's tensors of its samples, other than by gradients."""

from collections.abc import Iterator
from typing import Any, get_args

import torch

from fedvl.methods.base import Method, Samples
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors


class SamplesReadError(Exception):
    """A hook read the samples that it was given."""


class Sealed(Samples):
    """Samples that a hook may count but not read."""

    def __init__(self) -> None:
        super().__init__({}, torch.zeros(0))

    def __getattribute__(self, name: str) -> Any:
        if name in ("inputs", "labels"):
            raise SamplesReadError
        return super().__getattribute__(name)

    def __len__(self) -> int:
        return 2


def made_of_samples(method: Method, start: Tensors) -> str | None:
    """Return which hook reads a client's samples outside the loss, as part of a sentence, or None.

    Each such hook is called with sealed samples, so that no reading goes unnoticed.
    """
    role, sealed, tensors = method.role, Sealed(), dict(start)
    hook = ""
    try:
        for name, first in role.firsts.items():
            hook = f"'{name}'"
            tensors[name] = first(sealed)
        hook = "a client's private tensors"
        tensors |= method.join(sealed, torch_generator(0, "join", 0))
        tensors |= method.hand_out(start, {}, 0)
        private = [name for name in tensors if name not in start]
        for name, make in (*role.begins(private).items(), *role.ends(start, private).items()):
            hook = f"'{name}'"
            tensors[name] = make(name, tensors, start, sealed)
    except SamplesReadError:
        return hook
    return None


def alternatives(method: Method) -> Iterator[tuple[str, Method]]:
    """Yield the method with another choice of one of its options, and that choice as KEY=VALUE."""
    for key, field in method.options_type.model_fields.items():
        for value in get_args(field.annotation):
            if isinstance(value, str) and value != getattr(method.options, key):
                options = method.options.model_copy(update={key: value})
                yield f"{key}={value}", type(method)(options, method.task)
