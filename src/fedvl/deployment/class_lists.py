"""Names of a site's classes in a message: text that leaves by itself, if its policy allows."""

import json
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter, ValidationError

from fedvl.deployment.messages import MessageKind
from fedvl.display import visible
from fedvl.errors import FedVLError
from fedvl.tensors import Tensors

NAMES_OF_CLASSES: MessageKind = "names"  # a request of text, which no sum hides
CLASS_LIST_TENSOR = "names"
MAX_NAMED_CLASSES, MAX_CLASS_NAME = 10_000, 200  # of a site, and characters of each
CLASS_NAMES = TypeAdapter(
    Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_CLASS_NAME)]], Field(max_length=MAX_NAMED_CLASSES)]
)


def names_as_tensors(names: list[str]) -> Tensors:
    text = json.dumps([name[:MAX_CLASS_NAME] for name in names[:MAX_NAMED_CLASSES]])
    return {CLASS_LIST_TENSOR: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def names_of_tensors(tensors: Tensors) -> list[str]:
    """Return the names in a message that a stranger may have made, without unseen characters."""
    found = tensors.get(CLASS_LIST_TENSOR)
    if tensors.keys() != {CLASS_LIST_TENSOR} or found is None or found.dtype != torch.uint8 or found.dim() != 1:
        raise FedVLError("its class names have an unexpected format")
    try:
        return [visible(name) for name in CLASS_NAMES.validate_json(bytes(found.cpu().numpy()))]
    except ValidationError as error:
        raise FedVLError("its class names are not a list of short texts") from error
