"""pFedMMA (Ghiasvand et al., 2026): adapters in both towers; only their middle layer is shared.

Beside each of the last blocks of either tower runs an adapter: down to a few numbers, a middle
layer, and up again. ``down`` and ``up`` belong to the client and the tower. The middle layer is one
for images and texts: it aligns them, and is all that travels. What adapters say is scaled by 0.001,
so that the model stays near the pretrained one and still knows classes that nobody trained on.

The scale is of outputs alone: an adapter's own gradients are those of an unscaled one, and what
flows back through it to earlier blocks is scaled. A port without this trains a thousand times
slower.

Where there is a choice:

- In the released code blocks 5 to 12 of 12 have adapters: here the last ``layers`` of each tower,
  or all where there are fewer. The middle layers of towers of unlike depth are paired from the end.
- The paper trains 2 epochs in each of 50 rounds, the released script 1 in each of 100.
- The released evaluation keeps the class texts of the first client that it evaluates for all; here
  each client's adapters make its own.
- Who has no adapters (a new user) is answered by the pretrained model.
"""

from functools import partial

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear, normalize

from fedvl.config import Settings
from fedvl.errors import FedVLError
from fedvl.methods.base import Method, Options, Samples, Task
from fedvl.methods.parts.cosines import cosine_scores
from fedvl.methods.roles import Private, Role
from fedvl.models.transformer import UNCHANGED, Change
from fedvl.tensors import Tensors

SETTING: dict[str, Settings] = {
    "training": {"learning_rate": 0.001, "momentum": 0.9, "batch_size": 16, "local_epochs": 2},
    "federation": {"rounds": 50},
    "evaluation": {"protocol": "personal"},
}


class PFedMMAOptions(Options):
    layers: int = Field(8, ge=1)
    """Number of last blocks of each tower that have adapters."""
    dimension: int = Field(32, ge=1)
    """Width of an adapter's bottleneck."""
    adapter_scale: float = Field(0.001, ge=0)
    """Factor on the adapters' outputs."""
    template: str = "a photo of a {}."
    """Sentence that describes a class; {} stands for its name."""


class PFedMMA(Method):
    inputs = ("features", "pixels")
    labels = "candidates"
    vocabulary = "any"
    scope = "row"
    through_encoder = True
    options: PFedMMAOptions
    presets = {
        "paper": SETTING,
        "released": {
            **SETTING,
            # base2new.sh --train_batch_size 32, and WEIGHT_DECAY of Dassl's defaults
            "training": {**SETTING["training"], "local_epochs": 1, "batch_size": 32, "weight_decay": 5e-4},
            "federation": {"rounds": 100},
        },
    }

    def __init__(self, options: PFedMMAOptions, task: Task) -> None:
        super().__init__(options, task)
        if not task.clip.vision_layers:
            raise FedVLError(f"The image tower of {task.clip.name} takes no adapters; use a model with a ViT.")
        if "{}" not in options.template:
            raise FedVLError("method.template has no {} for the class name; write one, as in 'a photo of a {}.'.")
        self.depths = {"image": task.clip.vision_layers, "text": task.clip.text_layers}
        self.adapted = {tower: min(depth, options.layers) for tower, depth in self.depths.items()}
        tokens = task.clip.tokenise([options.template.replace("{}", name) for name in task.class_names])
        self.tokens = tokens.to(task.clip.positional_embedding.device)

    def roles(self) -> dict[str, Role]:
        parts = [f"{tower}.{part}" for tower in self.adapted for part in ("down", "up")]
        return {f"{part}.{kind}": Private(trained=True) for part in parts for kind in ("weight", "bias")}

    def start(self, generator: torch.Generator) -> Tensors:
        size = self.options.dimension
        return self.layer("middle", max(self.adapted.values()), size, size, generator)

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        widths = {"image": self.task.clip.vision_width, "text": self.task.clip.text_width}
        drawn: Tensors = {}
        for tower, width in widths.items():
            drawn |= self.layer(f"{tower}.down", self.adapted[tower], width, self.options.dimension, generator)
            drawn |= self.layer(f"{tower}.up", self.adapted[tower], self.options.dimension, width, generator)
        return drawn

    def layer(self, name: str, count: int, inputs: int, outputs: int, generator: torch.Generator) -> Tensors:
        """Draw as many linear layers by Kaiming's rule (normal, fan out), with biases 0."""
        weight = (2 / outputs) ** 0.5 * torch.randn(count, outputs, inputs, generator=generator)
        drawn = {f"{name}.weight": weight, f"{name}.bias": torch.zeros(count, outputs)}
        return {key: tensor.to(self.task.text_embeddings) for key, tensor in drawn.items()}

    def changes(self, tensors: Tensors, tower: str) -> list[Change]:
        """Return the adapter of each block of a tower, none for the first ones."""
        count = self.adapted[tower]
        unpaired = len(tensors["middle.weight"]) - count

        def layer(name: str, index: int) -> tuple[Tensor, Tensor]:
            return tensors[f"{name}.weight"][index], tensors[f"{name}.bias"][index]

        adapters = [
            partial(
                adapter,
                down=layer(f"{tower}.down", index),
                middle=layer("middle", unpaired + index),
                up=layer(f"{tower}.up", index),
                scale=self.options.adapter_scale,
            )
            for index in range(count)
        ]
        return [*[UNCHANGED] * (self.depths[tower] - count), *(Change(beside=each) for each in adapters)]

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        images, texts = inputs["features"], self.task.text_features
        if "image.up.weight" in tensors:
            pixels = self.task.clip.normalise(inputs["pixels"]).to(tensors["image.up.weight"].dtype)
            images = self.task.clip.encode_image(pixels, changes=self.changes(tensors, "image"))
            texts = self.task.clip.encode_text(self.tokens, changes=self.changes(tensors, "text"))
        images, texts = (normalize(x.to(self.task.text_embeddings), dim=-1) for x in (images, texts))
        return cosine_scores(self.scale, images, texts)


def adapter(
    x: Tensor,
    down: tuple[Tensor, Tensor],
    middle: tuple[Tensor, Tensor],
    up: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Return scale * up(relu(middle(relu(down(x))))), whose own gradients are not scaled."""
    still = x.detach()
    x = still + scale * (x - still)  # equals x, and passes back only a part of its gradient
    hidden = torch.relu(linear(torch.relu(linear(x, *down)), *middle))
    out = linear(hidden, *up)
    return scale * out.detach() + (out - out.detach())
