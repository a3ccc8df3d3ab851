"""Precision of the matrix products in training: float32, TF32 or bfloat16, on GPUs only.

Trained tensors, optimiser, losses and class scores stay float32, as does evaluation. Encoding has a
setting of its own, `model.encoding`.
"""

from collections.abc import Callable
from typing import Any

import torch

from fedvl.tensors import pick_device

FASTER = {"cuda"}  # kinds of device that gain by lower precision


def choose_precision(through_encoder: bool, device: str) -> str:
    """Return what ``auto`` means: bfloat16 through the encoder where a GPU has it, or float32."""
    found = pick_device(device) if through_encoder else "cpu"
    has_bfloat16 = found.startswith("cuda") and torch.cuda.get_device_capability(found) >= (8, 0)  # since Ampere
    return "bfloat16" if has_bfloat16 else "float32"


def used_precision(precision: str, device: str) -> str:
    """Return the precision of products on a kind of device."""
    return precision if device in FASTER else "float32"


def mixed_products(precision: str, device: str) -> torch.autocast:
    """Compute products in bfloat16 while an objective is evaluated, if that is the precision."""
    return torch.autocast(device, torch.bfloat16, enabled=used_precision(precision, device) == "bfloat16")


def in_precision(step: Callable[..., Any], precision: str, device: str) -> Callable[..., Any]:
    """Return the step, with its float32 products in TF32 if that is the precision."""
    if used_precision(precision, device) != "tf32":
        return step

    def rounded(*arguments: Any) -> Any:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return step(*arguments)
        finally:
            torch.set_float32_matmul_precision(before)

    return rounded
