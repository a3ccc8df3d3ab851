"""The gradient step of many clients: in one kernel, in closed form, by image, or one by one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.federation.graphs import Replayed
from fedvl.federation.privacy import RecordPrivacy, row_gradients
from fedvl.methods.base import Batch, Method, closed_form_of, overrides
from fedvl.methods.parts.losses import UNIT
from fedvl.tensors import Tensors, pick_device

GradientStep = Callable[[Tensors, Tensors, Batch], tuple[Tensors, tuple[Tensor, Tensors]]]


def gradient_step(
    method: Method,
    training: TrainingConfig,
    federation: FederationConfig,
    hidden: RecordPrivacy | None,
    device: str,
    same: bool,
    replay: bool = True,
) -> GradientStep:
    """Return the step; ``same``: all clients received the same tensors, which are not stacked.

    ``replay``: on a GPU as one graph, in which operations cannot be counted.
    """

    def objective(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        with mixed_products(training.precision, device):
            return method.objective({**still, **moving}, batch)

    of_received = None if same else 0
    axes = Batch(inputs=0, labels=0, mask=0, position=0, received=of_received, noise=0, whole=0)  # type: ignore[arg-type]
    stacked = torch.func.vmap(objective, in_dims=(0, 0, axes))

    def together(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensors, tuple[Tensor, Tensors]]:
        """Clients are independent, so the gradient of the summed loss is each one's own."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in moving.items()}
        losses, changed = stacked(leaves, still, batch)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        detached = {name: tensor.detach() for name, tensor in changed.items()}
        return dict(zip(leaves, gradients, strict=True)), (losses.detach(), detached)

    def by_row(moving: Tensors, still: Tensors, batch: Batch) -> Tensors:
        """Return the sum of one client's gradients, each image's or unit's cut before."""
        assert hidden is not None

        def of_row(inputs: Tensors, label: Tensor, mask: Tensor, position: Tensor) -> Tensors:
            row = batch._replace(inputs=lift(inputs), labels=label[None], mask=mask[None], position=position[None])
            return dict(torch.func.grad(lambda tensors: objective(tensors, still, row)[0])(moving))

        gradients = torch.func.vmap(of_row)(batch.inputs, batch.labels, batch.mask, batch.position)
        return row_gradients(gradients, batch.mask, hidden.clip, batch.inputs.get(UNIT))

    def row_by_row(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensors, tuple[Tensor, Tensors]]:
        totals = torch.func.vmap(by_row, in_dims=(0, 0, axes))(moving, still, batch)
        return totals, (batch.mask.new_zeros(len(batch.mask)), {})

    def fastest(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensors, tuple[Tensor, Tensors]]:
        if (closed_form := closed_form_of(method)) is None:  # asked at each step: a loss may be replaced at any time
            return together(moving, still, batch)
        gradients, losses, changed = closed_form(method, {**still, **moving}, batch)
        return gradients, (losses, changed)

    gradient = torch.func.grad_and_value(objective, has_aux=True)

    def alone(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensors, tuple[Tensor, Tensors]]:
        gradients, (loss, changed) = gradient(first(moving), first(still), first_batch(batch, same))
        return lift(gradients), (loss[None], lift(changed))

    if hidden:
        step: GradientStep = row_by_row
    elif federation.one_by_one:
        step = corrected(alone, method, of_received)
    else:
        batched = corrected(fastest, method, of_received)
        step = Replayed(batched) if device == "cuda" and replay else batched
    return in_precision(step, training.precision, device)


def corrected(step: GradientStep, method: Method, of_received: int | None) -> GradientStep:
    """Return the step with the gradients that the method makes of those of its loss."""
    if not overrides(method, "correct"):
        return step
    correct = torch.func.vmap(method.correct, in_dims=(0, 0, of_received))

    def with_correction(moving: Tensors, still: Tensors, batch: Batch) -> tuple[Tensors, tuple[Tensor, Tensors]]:
        gradients, rest = step(moving, still, batch)
        return correct(gradients, {**still, **moving}, batch.received), rest

    return with_correction


def prefix(tensors: Tensors, count: int) -> Tensors:
    return {name: tensor[:count] for name, tensor in tensors.items()}


def first(tensors: Tensors) -> Tensors:
    return {name: tensor[0] for name, tensor in tensors.items()}


def first_batch(batch: Batch, same: bool) -> Batch:
    """Return the first client's batch; ``same``: what all received is not stacked."""
    return batch._replace(
        inputs=first(batch.inputs),
        labels=batch.labels[0],
        mask=batch.mask[0],
        position=batch.position[0],
        received=batch.received if same else first(batch.received),
        noise=first(batch.noise),
        whole=first(batch.whole),
    )


def lift(tensors: Tensors) -> Tensors:
    return {name: tensor[None] for name, tensor in tensors.items()}


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
