"""A device that is not the CPU, on a machine that has no other: what mixes the two raises, as it does with a GPU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

ELSEWHERE = torch.device("meta")  # the name alone; its tensors have values
MOVES = {"_to_copy", "copy_"}
BY_ROWS = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}  # a GPU takes rows from the CPU


class Distant(Tensor):
    """A tensor that says to be elsewhere."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> "Distant":
        found = Tensor._make_wrapper_subclass(
            cls,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=ELSEWHERE,
        )
        found.value = value
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return computed(func, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class MadeElsewhere(TorchFunctionMode):
    """What ``torch.tensor`` and ``new_tensor`` make is on its device before a dispatch mode sees it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist:
            return func(args[0].cpu())
        if func is Tensor.new_tensor:
            kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
            func, args = torch.tensor, args[1:]
        if func is torch.tensor and kwargs.get("device") == ELSEWHERE:
            return torch.tensor(*args, **{**kwargs, "device": "cpu"}).to(ELSEWHERE)
        return func(*args, **kwargs)


@contextmanager
def elsewhere() -> Iterator[None]:
    """While it lasts, tensors can be made on and moved to ``ELSEWHERE``."""
    none = patch.multiple(torch, autocast=lambda *_, **__: nullcontext(), is_autocast_enabled=lambda *_: False)
    with Elsewhere(), MadeElsewhere(), none:  # PyTorch knows of no lower precision there
        yield


def computed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
    distant = [one for one in tensors if isinstance(one, Distant)]
    near = [one for one in tensors if not isinstance(one, Distant) and one.dim()]
    if distant and near and name not in MOVES and not (name in BY_ROWS and isinstance(args[0], Distant)):
        raise RuntimeError(f"{name} mixes tensors of two devices.")
    asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    there = asked == ELSEWHERE if asked is not None else bool(distant)
    if name == "copy_":
        there = isinstance(args[0], Distant)
    inner = {**kwargs, "device": torch.device("cpu")} if asked is not None else dict(kwargs)
    own_args, own_kwargs = tree_map_only(Distant, lambda one: one.value, (args, inner))
    found = func(*own_args, **own_kwargs)
    same = {id(one.value): one for one in distant}
    return (
        tree_map_only(Tensor, lambda one: same[id(one)] if id(one) in same else Distant(one), found) if there else found
    )


def moved_encoder(encoder: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return a copy of an encoder on a device."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # else a parameter keeps its type of tensor
    try:
        return deepcopy(encoder).to(device)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
