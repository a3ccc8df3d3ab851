"""The most memory in use since a moment: of this process, and of its tensors on a GPU."""

import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak(NamedTuple):
    """Bytes; ``gpu`` is None without one."""

    process: int
    gpu: int | None


def begin(device: torch.device) -> None:
    """Forget earlier peaks; where a system cannot, that of the process is since its start."""
    with suppress(OSError):
        RESET.write_text("5")  # Linux: the peak is set back to what is in use now
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> Peak:
    """Return the peaks until now."""
    gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Peak(_of_process(), gpu)


def _of_process() -> int:
    try:
        found = [line.split() for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    except OSError:
        found = []
    if found:
        return int(found[0][1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # which counts in bytes there
