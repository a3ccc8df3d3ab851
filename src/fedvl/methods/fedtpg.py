"""FedTPG (Qiu et al., 2024): an averaged network generates the context for any class names.

Learned queries attend to the text embeddings of the bare class names; the output is the context of
these classes. A client's comes from the names of its own classes, among which alone it is trained;
a user's from the queried names. So classes that nobody trained on can be queried.

The released code fixes widths to 512; here they follow the model (text tower and joint). At 512 the
network has the same 4,206,080 numbers. Clients count equally, as there; not its 16-bit arithmetic.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize

from fedvl.errors import FedVLError
from fedvl.methods.base import Batch, Method, Options, Samples, Task
from fedvl.methods.parts.adapters import linear_layer
from fedvl.methods.parts.losses import label_loss
from fedvl.methods.parts.prompts import SPREAD, ClassTexts
from fedvl.methods.roles import Private, Role
from fedvl.tensors import Tensors

HEADS, WIDENING = 4, 4
TRAINING = {"learning_rate": 0.003, "momentum": 0.9, "weight_decay": 1e-5, "batch_size": 200, "schedule": "cosine"}
TEXTS_AT_ONCE = 256


class FedTPGOptions(Options):
    context: int = Field(4, ge=1)  # tokens that the network generates
    classes: Literal["own", "all"] = "own"  # names that a client trains with: of classes that it has images of, or all


class FedTPG(Method):
    labels = "candidates"
    vocabulary = "any"
    scope = "row"
    options: FedTPGOptions
    weighting = "clients"  # as the released code
    presets = {
        "paper": {"training": TRAINING},
        "released": {"training": TRAINING, "federation": {"rounds": 500}, "data": {"shots": 8}},
    }

    def __init__(self, options: FedTPGOptions, task: Task) -> None:
        super().__init__(options, task)
        if task.clip.text_width % HEADS:
            raise FedVLError(
                f"FedTPG's attention has {HEADS} heads, which do not divide the text width of {task.clip.name}, "
                f"{task.clip.text_width}; use another model."
            )
        self.texts = ClassTexts(task.clip, task.class_names, options.context)
        self.names = bare_names(task)

    def roles(self) -> dict[str, Role]:
        return {"own_classes": Private(lasts=False)}  # it follows from the client's data

    def start(self, generator: torch.Generator) -> Tensors:
        """Draw layers as PyTorch does: attention by Xavier's rule, others within 1/sqrt(inputs)."""
        width, joint = self.task.clip.text_width, self.names.shape[1]
        tensors = {"queries": SPREAD * torch.randn(self.options.context, width, generator=generator)}
        for name, inputs in (("query", width), ("key", joint), ("value", joint)):
            bound = (6 / (inputs + 3 * width)) ** 0.5
            tensors[f"{name}.weight"] = torch.empty(width, inputs).uniform_(-bound, bound, generator=generator)
            tensors[f"{name}.bias"] = torch.zeros(width)
        tensors["mixed.weight"], tensors["mixed.bias"] = linear_layer(width, width, generator)[0], torch.zeros(width)
        wide = WIDENING * width
        tensors["wide.weight"], tensors["wide.bias"] = linear_layer(width, 2 * wide, generator)
        tensors["narrow.weight"], tensors["narrow.bias"] = linear_layer(wide, width, generator)
        for name, size in (("queries", width), ("names", joint), ("hidden", width)):
            tensors[f"norm.{name}.weight"], tensors[f"norm.{name}.bias"] = torch.ones(size), torch.zeros(size)
        return {name: tensor.to(self.names.device) for name, tensor in tensors.items()}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        own = torch.bincount(samples.labels[samples.labels >= 0], minlength=len(self.names)) > 0
        every = self.options.classes == "all" or not own.any()
        return {"own_classes": torch.ones_like(own) if every else own}

    def generated(self, tensors: Tensors, present: Tensor | None = None) -> Tensor:
        """Return the context (P x width) for the class names, or for those that are ``present``."""
        attended = attention(
            tensors, norm(tensors, "queries", tensors["queries"]), norm(tensors, "names", self.names), present
        )
        value, gate = linear(norm(tensors, "hidden", attended), tensors["wide.weight"], tensors["wide.bias"]).chunk(
            2, -1
        )
        return attended + linear(value * gelu(gate), tensors["narrow.weight"], tensors["narrow.bias"])  # GEGLU

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        scores = self.predict(tensors, batch.inputs)
        return label_loss(scores.masked_fill(~tensors["own_classes"], torch.finfo(scores.dtype).min), batch)

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return self.texts.scores(self.generated(tensors, tensors.get("own_classes")), inputs["features"])


def bare_names(task: Task) -> Tensor:
    """Return unit text embeddings of the class names without a template."""
    device = task.clip.positional_embedding.device
    with torch.no_grad():
        parts = [
            task.clip.encode_text(task.clip.tokenise(task.class_names[first : first + TEXTS_AT_ONCE]).to(device))
            for first in range(0, len(task.class_names), TEXTS_AT_ONCE)
        ]
    return normalize(torch.cat(parts), dim=-1)


def norm(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], tensors[f"norm.{name}.weight"], tensors[f"norm.{name}.bias"])


def attention(tensors: Tensors, queries: Tensor, names: Tensor, present: Tensor | None) -> Tensor:
    """Attend from the queries to the names (those present), with heads but no residual."""
    query, key, value = (
        linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]).reshape(len(x), HEADS, -1).transpose(0, 1)
        for name, x in (("query", queries), ("key", names), ("value", names))
    )
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if present is not None:
        scores = scores.masked_fill(~present, float("-inf"))
    return linear(
        (scores.softmax(-1) @ value).transpose(0, 1).flatten(1), tensors["mixed.weight"], tensors["mixed.bias"]
    )
