"""CacheFL (Yi et al., 2025): clients train the keys of a cache of synthetic images for CLIP.

The server builds the cache from a class-balanced synthetic set (eq. 2 to 4). An image is compared
with every key; the classes of near keys are added to its zero-shot scores (eq. 5 to 7). Only keys
are trained (eq. 8) and averaged (eq. 9). From Tip-Adapter, as the paper is silent: the logit scale
in eq. 5 (without it alpha from 0.6 to 10 makes no sense), and alpha and beta for other datasets.
"""

from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Method, Options
from fedvl.methods.parts.heads import class_scores, head_roles, head_start
from fedvl.methods.parts.synthetic import (
    HELD_OUT,
    PIPELINE,
    features_around,
    features_held_out,
    features_of_pictures,
    generate_pictures,
    pictures_folder,
)
from fedvl.methods.roles import Role, Shared
from fedvl.tensors import Tensors


class CacheOptions(Options):
    alpha: float = Field(1.17, ge=0)
    """Weight of the cache, eq. 7; 1.17 is Tip-Adapter's value for ImageNet, Food-101 and Pets."""
    beta: float = Field(1.0, gt=0)
    """Sharpness of the comparison between an image and a key, eq. 6."""
    scale: float | None = Field(None, gt=0)
    """Factor on the zero-shot scores; the model's logit scale if absent."""
    cache_shots: int = Field(16, ge=1)
    """Synthetic images per class in the cache."""
    synthetic: str | None = None
    """Source of the synthetic images: an image folder, diffusers:MODEL, or held-out for images that
    no client holds. If absent, features are sampled around the class texts.
    """
    prompt: str = "a photo of a {}"
    """Prompt of the text-to-image model; {} stands for the class name. @FILE reads a description of
    each class, in lines of the form CLASS: description.
    """
    sigma: float = Field(0.02, ge=0)
    """Standard deviation of the features sampled around the class texts."""


class CacheFL(Method):
    options: CacheOptions
    scope = "row"
    starts_from_head = True
    presets = {
        "paper": {
            "data": {"shots": 16, "minimum": 0},
            "training": {"learning_rate": 0.001, "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 32},
            "federation": {"rounds": 20},
        },
        # Tip-Adapter-F's optimiser, which moves keys of unit length, and several steps in a round of few images
        "tip-adapter": {
            "data": {"shots": 16, "minimum": 0},
            "training": {
                "optimiser": "adamw",
                "learning_rate": 0.001,
                "epsilon": 1e-4,
                "weight_decay": 0.01,
                "batch_size": 4,
            },
            "federation": {"rounds": 20},
        },
    }

    def roles(self) -> dict[str, Role]:
        return {"keys": Shared(features=True), **head_roles(self.task)}

    def start(self, generator: torch.Generator) -> Tensors:
        return {"keys": self.first_keys(generator), **head_start(self.task)}

    def first_keys(self, generator: torch.Generator) -> Tensor:
        """Return W1 of eq. 3 as unit rows, class by class, which makes W2 of eq. 4 implicit."""
        options, task = self.options, self.task
        if options.synthetic is None:
            return features_around(task.text_features, options.cache_shots, options.sigma, generator)
        if options.synthetic == HELD_OUT:
            return features_held_out(task.held_out(), task.class_names, options.cache_shots, task.seed)
        folder = Path(options.synthetic).expanduser()
        if options.synthetic.startswith(PIPELINE):
            folder = generate_pictures(
                options.synthetic.removeprefix(PIPELINE),
                options.prompt,
                task.class_names,
                options.cache_shots,
                task.text_features.device,
                task.stage("Generate images"),
            )
        keys = features_of_pictures(
            folder, task.class_names, options.cache_shots, task.clip, task.stage("Encode synthetic images")
        )
        return keys.to(task.text_features)

    def notes(self) -> list[str]:
        options = self.options
        origin = f"built from the images in {options.synthetic}"
        if options.synthetic is None:
            origin = f"drawn around the class texts (sigma {options.sigma:g}), since method.synthetic is not set"
        elif options.synthetic == HELD_OUT:
            origin = "built from training images that no client holds, in place of generated ones"
        elif options.synthetic.startswith(PIPELINE):
            folder = pictures_folder(options.synthetic.removeprefix(PIPELINE), options.prompt)
            origin = f"built from images that {options.synthetic.removeprefix(PIPELINE)} generated in {folder}"
        return [f"The cache was {origin}; alpha is {options.alpha:g} and beta {options.beta:g}."]

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        features = inputs["features"]
        zero_shot = class_scores(self, tensors, features)  # eq. 5
        return zero_shot + self.options.alpha * self.retrieved(features @ tensors["keys"].T, self.options.beta)  # eq. 7

    def retrieved(self, affinity: Tensor, beta: float) -> Tensor:
        """Return eq. 6; the product with the one-hot W2 is a sum over each class's keys."""
        near = torch.exp(beta * affinity - beta)
        return near.view(*near.shape[:-1], len(self.task.class_names), -1).sum(-1)
