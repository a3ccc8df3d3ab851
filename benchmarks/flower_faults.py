"""Give the invalid updates of ``tests.helpers.bad_updates`` to Flower's own FedAvg."""

import logging
import math
import os
from collections.abc import Callable
from io import BytesIO

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from numpy.lib import format as npy
from numpy.typing import NDArray

from benchmarks.faults import BAD, trial_updates, without_bad
from fedvl.methods.base import Update
from fedvl.tensors import Tensors, weighted_mean
from tests.helpers.bad_updates import LIMIT, TENSORS, TERA, WEIGHTS, Canary

logging.getLogger("flwr").setLevel(logging.ERROR)
TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # messages can be created only within a run


def as_npy(data: bytes, like: NDArray[np.float32]) -> Array:
    return Array(dtype=str(like.dtype), shape=like.shape, stype="numpy.ndarray", data=data)


def claiming(array: NDArray[np.float32], shape: tuple[int, ...]) -> Array:
    """Return the bytes of an array under a header of another shape."""
    file = BytesIO()
    npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return as_npy(file.getvalue() + array.tobytes(), array)


def pickled(array: NDArray[np.float32]) -> Array:
    file = BytesIO()
    np.save(file, np.array([Canary()], dtype=object), allow_pickle=True)
    return as_npy(file.getvalue(), array)


# Flower's arrays are in numpy's format, so their bytes are changed in the same ways where possible.
ARRAYS: dict[str, Callable[[NDArray[np.float32]], Array]] = {
    "string": lambda array: Array(np.array(["poison"])),
    "object": pickled,
    "truncated payload": lambda array: as_npy(Array(array).data[:-7], array),
    "header that lies": lambda array: claiming(array, (3, 3, 3)),
    "3.6 TiB header": lambda array: claiming(array, (TERA,)),
    "oversized message": lambda array: as_npy(Array(array).data + bytes(LIMIT), array),
}


def reply(update: Update, kind: str | None) -> Message:
    arrays = {name: Array(tensor.numpy()) for name, tensor in update.tensors.items()}
    first = min(arrays)
    tensor = update.tensors[first]
    if kind in TENSORS:
        spoilt = TENSORS[kind](tensor)
        arrays.pop(first)
        arrays |= {} if spoilt is None else {first: Array(spoilt.numpy())}
    elif kind in ARRAYS:
        arrays[first] = ARRAYS[kind](tensor.numpy())
    elif kind == "extra key":
        arrays["backdoor"] = Array(np.ones(1, dtype=np.float32))
    elif kind == "invalid UTF-8 key":
        arrays[f"{first}\udcff"] = arrays.pop(first)
    weight = WEIGHTS.get(kind or "", update.weight)
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": weight})})
    return Message(content=content, dst_node_id=0, message_type="train")


def merged(replies: list[Message]) -> dict[str, NDArray[np.float32]]:
    """Return the next model of Flower's FedAvg."""
    arrays, _ = FedAvg().aggregate_train(1, replies)
    assert arrays is not None
    return {name: array.numpy() for name, array in arrays.items()}


def distance(model: dict[str, NDArray[np.float32]], expected: Tensors) -> float:
    return max(float(np.abs(model[name] - tensor.numpy()).max()) for name, tensor in expected.items())


def theirs(kind: str) -> str:
    _, updates = trial_updates()
    everyone = weighted_mean([update.tensors for update in updates], [update.weight for update in updates])
    control = distance(merged([reply(update, None) for update in updates]), everyone)
    assert control < 1e-6, "four honest clients are not averaged as they should be: the trial is wrong"
    replies = [reply(update, kind if update.client == BAD else None) for update in updates]
    try:
        model = merged(replies)
    except Exception as error:  # nothing in Strategy.start catches it
        return f"the run ends: {type(error).__name__}"
    off = distance(model, without_bad(updates))
    if not math.isfinite(off):
        return "**merged: the model is not finite**"
    if distance(model, everyone) < 1e-6:
        return "read as if nothing were wrong"
    return "has no effect" if off < 1e-6 else f"**merged: the model is off by {off:.2g}**"
