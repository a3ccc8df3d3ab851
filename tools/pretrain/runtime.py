"""What the training scripts share: how long to run, where, and in which precision."""

import contextlib
import time

import torch


class Budget:
    """How far a stage of training has come, from 0 to 1: by wall clock, or by steps if a number of steps is given.

    The shipped models were trained by wall clock. Only a run by steps can be repeated exactly. The clock starts at the
    end of the first step, so that compilation does not count.
    """

    def __init__(self, seconds: float, steps: int | None) -> None:
        self.seconds, self.steps = seconds, steps
        self.started: float | None = None

    def elapsed(self) -> float:
        return 0.0 if self.started is None else time.monotonic() - self.started

    def progress(self, step: int) -> float:
        done, whole = (self.elapsed(), self.seconds) if self.steps is None else (step, self.steps)
        return done / whole if whole > 0 else 1.0

    def step_done(self) -> None:
        if self.started is None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.started = time.monotonic()


def choose_device() -> torch.device:
    """The GPU if there is one."""
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mixed_precision(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """bf16 on a GPU; on a CPU everything stays fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate


def descend(optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """One step of the optimiser, gradients clipped to norm 1."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimiser.step()
