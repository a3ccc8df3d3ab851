"""A function of the user's that looks at each round and cannot change the run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from fedvl.errors import FedVLError
from fedvl.federation.records import Record
from fedvl.tensors import ByClient, Tensors

OnRound = Callable[[Record, Tensors, ByClient], object]


def look(on_round: OnRound, record: Record, shared: Tensors, private: Mapping[int, Tensors], folder: Path) -> None:
    """Show copies of a committed round to the user's function; name it if it fails."""
    try:
        with undisturbed():
            on_round(
                record.model_copy(deep=True),
                cpu_copies(shared),
                {client: cpu_copies(tensors) for client, tensors in private.items() if tensors},
            )
    except Exception as error:  # whatever the user's code does wrong
        name = getattr(on_round, "__name__", type(on_round).__name__)
        reason = (str(error).strip() or "no reason given").splitlines()[0].rstrip(".")
        raise FedVLError(
            f"on_round={name} failed after round {record.round} with {type(error).__name__}: {reason}; the round is "
            f'committed, so mend the function and go on by fedvl.resume("{folder}", on_round={name}).'
        ) from error


def cpu_copies(tensors: Tensors) -> Tensors:
    """Return copies in the memory of the processor, without gradients."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put back what a function may set in torch that bits depend on."""
    threads, kind = torch.get_num_threads(), torch.get_default_dtype()
    precision, gradients = torch.get_float32_matmul_precision(), torch.is_grad_enabled()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(kind)
            torch.set_float32_matmul_precision(precision)
            torch.set_grad_enabled(gradients)
