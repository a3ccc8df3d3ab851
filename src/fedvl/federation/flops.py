"""Count the floating-point operations of a step, as PyTorch's own counter does.

That counter loads PyTorch's compiler, which takes longer than a small run; this one does not.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of matrix products, convolutions and attention while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be loaded to be told so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(func._overloadpacket)
        if count is None and func is not torch.ops.prim.device.default:
            with self:
                parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
        found = func(*args, **kwargs)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=found)
        return found
