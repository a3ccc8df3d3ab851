"""What went wrong in a method's own file, in one sentence for its author."""

import fnmatch
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import isfunction
from pathlib import Path

import torch
from torch import Tensor

from fedvl.errors import FedVLError
from fedvl.methods import own_file, own_text
from fedvl.methods.base import HOOKS, Method, Samples
from fedvl.methods.roles import Private, Server, Shared

# How PyTorch puts a breach of each of the three rules, and what to do instead.
RULE_SENTENCES = {
    "rule 1 (write nothing in place): make a new tensor": (
        "in-place operation",
        "inplace arithmetic",
        "match the broadcast shape",
    ),
    "rule 2 (do not branch on the value of a tensor): none can be read out; use torch.where and the like, and to look at "
    "values while debugging, run with --one-by-one": (
        "data-dependent control flow",
        "calling .item()",
        "Cannot access data pointer",
    ),
    "rule 3 (take random numbers from noise): draw them in noise and read batch.noise": ("randomness error mode",),
}
LOSS = "loss must return one number that depends on the tensors of start through operations with gradients"
MAX_ERROR_LENGTH = 200  # characters


@dataclass
class Tried:
    """What a mistake is looked for in, once it is there."""

    method: Method | None = None
    samples: Samples | None = None


@contextmanager
def explained(name: str) -> Iterator[Tried]:
    """Tell a method's author what is wrong in its file, and not where the engine failed by it.

    Of a method in the package, whose author may be another, only what surely is its own mistake.
    """
    tried, packaged = Tried(), not (name.endswith(".py") or "@" in name)
    try:
        yield tried
    except (FedVLError, OSError, MemoryError):
        raise
    except Exception as error:
        sentence = mistake(error, own_file(name), tried.method, tried.samples, packaged)
        if sentence is None:
            raise
        raise FedVLError(sentence) from error


def mistake(error: Exception, file: Path, method: Method | None, samples: Samples | None, packaged: bool) -> str | None:
    """Return the author's own line and the rule that it breaks, or the hook that is wrong."""
    reason = (str(error).strip() or "no reason given").splitlines()[0][:MAX_ERROR_LENGTH].rstrip(".")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if same_file(frame.filename, file)]
    where = f"{file.name}, line {frames[-1].lineno}, in {frames[-1].name}: `{frames[-1].line}`" if frames else file.name
    for rule, signs in RULE_SENTENCES.items():
        if frames and any(sign in str(error) for sign in signs):
            return f"{where} breaks {rule}."
    # what a hook returned may fail later, in code that is not the author's
    broken = broken_hook(method, samples) if method is not None and samples is not None else None
    if broken or not frames:
        if packaged and not broken:
            return None
        return f"{file.name} does not fit docs/contract.md: {broken or LOSS if method else reason}."
    return f"{where} fails with {type(error).__name__}: {reason}."


def same_file(name: str, file: Path) -> bool:
    return Path(name).resolve() == file.resolve()


def broken_hook(method: Method, samples: Samples) -> str | None:
    """Return which hook returns what the contract does not allow, tried on two samples."""
    try:
        shared = method.start(torch.Generator())
        if not isinstance(shared, dict) or not all(isinstance(tensor, Tensor) for tensor in shared.values()):
            return f"start must return a dictionary of tensors by name, and returns {shown_value(shared)}"
        for name, tensor in method.role.split(shared)[0].items():
            if method.role.shared(name).trained and not tensor.is_floating_point():
                return f"start returns {name!r} as {tensor.dtype}, which needs the role Shared(trained=False)"
        few = samples.take(torch.arange(min(2, len(samples))))
        scores = method.predict({**shared, **method.join(few, torch.Generator())}, few.inputs)
    except Exception as error:
        return str(error).splitlines()[0] if isinstance(error, TypeError) and "defines no" in str(error) else None
    wanted = (len(few), len(method.task.class_names))
    if not isinstance(scores, Tensor) or scores.shape != wanted:
        return f"predict must return one row of {wanted[1]} scores for each image, and returns {shown_value(scores)}"
    return None


def check_names(name: str, method: Method, samples: Samples) -> None:
    """Refuse a hook or a role in the user's own file that is misspelt: it would be passed over."""
    if not name.endswith(".py") and "@" not in name:
        return
    file, text = own_file(name), own_text(name)
    for own, item in vars(type(method)).items():
        close = get_close_matches(own, HOOKS, n=1, cutoff=0.8)
        if isfunction(item) and close and own not in HOOKS and len(re.findall(rf"\b{own}\b", text)) == 1:
            raise FedVLError(f"{file.name} has {own}, which is no hook and is called nowhere; did you mean {close[0]}?")
    few = samples.take(torch.arange(min(2, len(samples))))
    made = [*method.start(torch.Generator()), *method.first_private(few, torch.Generator())]
    for own, role in method.role.declared.items():
        close = get_close_matches(own, made, n=1, cutoff=0.8)
        if isinstance(role, Shared | Private | Server) and close and not fnmatch.filter(made, own):
            raise FedVLError(
                f"{file.name} gives {own!r} a role, but there is no such tensor; did you mean {close[0]!r}?"
            )


def shown_value(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
