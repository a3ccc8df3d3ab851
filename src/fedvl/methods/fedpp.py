"""FedPP (anonymous, 2024): clients without labels agree on which images to trust, and share what they learn of images only.

Every few rounds clients count the classes of their reliable images; the totals say how many of each class every client
labels (eq. 2 and 3, ``parts/pseudo_labels.py``). Each trains deep visual prompts, which the server averages by the number
of labels used (eq. 4), and a text context that never leaves it (eq. 5).

Where the paper leaves a choice, or its successor FedCoPL's code another:

- Eq. 3 needs the class totals only, so a client can work out its own share: the server never learns a client's counts.
  ``counts = "sent"`` is the paper's form, in which it does; the numbers are the same.
- "r % Q = 0" would leave the first rounds without labels: labels are made before rounds 1, Q + 1, 2 Q + 1 and so on, first
  from the class texts and later from the client's own prompts.
- The surest images of a class are chosen among those whose likeliest class it is, so that no image has two labels.
- Weight decay is the code's. Its optimiser serves all clients, so that momentum leaks from one to the next; ours is fresh.
- Prompts go to all layers but the last, 11 of 12 in the code, whatever the model.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from fedvl.errors import FedVLError
from fedvl.methods.base import Batch, Method, Options, Samples, Task
from fedvl.methods.parts import pseudo_labels
from fedvl.methods.parts.losses import cross_entropy
from fedvl.methods.parts.prompts import SPREAD, ClassTexts
from fedvl.tensors import Tensors

IMAGES_AT_ONCE = 256  # when a client looks over all its images
TRAINING = {
    "learning_rate": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.05,
    "batch_size": 64,
    "local_epochs": 10,
    "schedule": "cosine-restarts",
    "restart_rounds": 5,
}
REST = {"federation": {"rounds": 20}, "evaluation": {"protocol": "personal", "batch_size": IMAGES_AT_ONCE}}


class FedPPOptions(Options):
    visual_prompts: bool = True  # without them images are encoded once, and nothing is shared
    visual_tokens: int = Field(5, ge=1)  # at each layer
    visual_layers: Literal["all-but-last", "all"] = "all-but-last"
    text_prompts: bool = True  # without them the class texts stay as they are
    context: int = Field(16, ge=1)  # learned tokens before the class name
    interval: int = Field(5, ge=1)  # Q: rounds between selections of labels; training.restart_rounds should be the same
    selection: Literal["cps", "fpl", "upl", "zero-shot"] = "cps"
    shots: int = Field(16, ge=1)  # labels of each class and client under fpl and upl
    filters: pseudo_labels.Filters = "both"  # which medians an image must pass to be counted, eq. 2
    quota: pseudo_labels.Quota = "quarter"  # M of eq. 3
    counts: Literal["summed", "sent"] = "summed"  # what the server sees of the clients' counts


class FedPP(Method):
    inputs = ("features", "pixels")
    needs_labels = False
    per_sample = ("labels", "likeliest", "confidence")
    trained_private = ("context",)
    options_type = FedPPOptions
    presets = {
        "paper": {"training": TRAINING, **REST},
        "released": {"method": {"quota": "mean-reliable"}, "training": TRAINING, **REST},
    }

    def __init__(self, options: FedPPOptions, task: Task) -> None:
        super().__init__(options, task)
        self.options = options
        self.sums_reports = options.counts == "summed"
        self.scale = task.clip.logit_scale
        self.classes = len(task.class_names)
        layers = task.clip.vision_layers
        self.layers = max(layers - 1, 1) if options.visual_layers == "all-but-last" else layers
        if options.visual_prompts and not layers:
            raise FedVLError(
                f"The image tower of {task.clip.name} takes no prompts; use a ViT, or --set method.visual_prompts=false."
            )
        if not (options.visual_prompts or options.text_prompts):
            raise FedVLError("FedPP without visual and text prompts trains nothing; leave one of them on.")
        if options.text_prompts:
            self.texts = ClassTexts(task.clip, task.class_names, options.context)

    @classmethod
    def forms(cls, options: FedPPOptions) -> tuple[str, ...]:
        return cls.inputs if options.visual_prompts else ("features",)

    def start(self, generator: torch.Generator) -> Tensors:
        if not self.options.visual_prompts:
            return {}
        shape = (self.layers, self.options.visual_tokens, self.task.clip.vision_width)
        drawn = SPREAD * torch.randn(shape, generator=generator)
        return {"visual": drawn.to(self.task.text_embeddings)}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        nothing = torch.zeros_like(samples.labels)
        private = {
            "labels": nothing - 1,
            "likeliest": nothing,
            "confidence": nothing.to(self.task.text_embeddings.dtype),
            "counts": nothing.new_zeros(self.classes),
        }
        return private | ({"context": self.texts.start(generator)} if self.options.text_prompts else {})

    # --- cooperative selection of labels

    def consults(self, round_index: int) -> bool:
        return round_index % self.options.interval == 0

    def report(self, round_index: int, tensors: Tensors, samples: Samples) -> tuple[Tensors, Tensors]:
        """The classes of the client's reliable images (eq. 2), counted, and how many images it has."""
        table = self.table(round_index, tensors, samples.inputs)
        if self.options.selection != "cps":
            labelled = pseudo_labels.LABELLERS[self.options.selection](table, self.options.shots)
            return {}, {"labels": labelled.labels}
        confidence, likeliest = table.max(-1)
        counts = pseudo_labels.count_classes(
            likeliest[pseudo_labels.reliable(table, self.options.filters)], self.classes
        )
        sent = {"counts": counts.float(), "images": counts.new_tensor([len(samples)]).float()}
        return sent, {"likeliest": likeliest, "confidence": confidence, "counts": counts}

    def report_shapes(self) -> dict[str, tuple[int | None, ...]]:
        return {"counts": (self.classes,), "images": (1,)} if self.options.selection == "cps" else {}

    def settle(self, round_index: int, total: Tensors, own: Tensors | None) -> Tensors:
        """The totals and the quota M, or what eq. 3 makes of them for a client whose counts the server knows."""
        if self.options.selection != "cps":
            return {}
        totals = total["counts"].long()
        generation = round_index // self.options.interval
        most = pseudo_labels.quota(self.options.quota, int(total["images"]), totals, generation)
        if own is None:
            return {"totals": total["counts"], "quota": total["counts"].new_tensor([most])}
        allocated = pseudo_labels.allocation(own["counts"].long(), totals, most, self.task.clients)
        return {"allocation": allocated.float()}

    def adopt(self, private: Tensors, settlement: Tensors) -> Tensors:
        if self.options.selection != "cps":
            return {}
        if "allocation" in settlement:
            allocated = settlement["allocation"].long()
        else:
            totals, most = settlement["totals"].long(), int(settlement["quota"])
            allocated = pseudo_labels.allocation(private["counts"], totals, most, self.task.clients)  # eq. 3
        return {"labels": pseudo_labels.pick(private["likeliest"], private["confidence"], allocated)}

    def table(self, round_index: int, tensors: Tensors, inputs: Tensors) -> Tensor:
        """Class probabilities of all images: at first by the class texts, later by the client's own prompts."""
        if round_index == 0:
            return pseudo_labels.probabilities(inputs["features"], self.task.text_features, self.scale)
        parts = range(0, len(inputs["features"]), IMAGES_AT_ONCE)
        scores = [
            self.predict(tensors, {name: tensor[first : first + IMAGES_AT_ONCE] for name, tensor in inputs.items()})
            for first in parts
        ]
        return torch.softmax(torch.cat(scores), dim=-1)

    def positions(self, private: Tensors) -> Tensor:
        return torch.nonzero(private["labels"] >= 0)[:, 0]

    def pseudo_labels(self, private: Tensors) -> Tensor | None:
        return private.get("labels")

    # --- prompts

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        labels = tensors["labels"][batch.position]
        return cross_entropy(self.predict(tensors, batch.inputs), labels, batch.mask), {}  # eq. 5

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        """g(P^v, P^t; x) of eq. 5; whoever has no context of its own asks with the class texts."""
        images = inputs["features"]
        if "visual" in tensors:
            pixels = self.task.clip.normalise(inputs["pixels"]).to(tensors["visual"].dtype)
            images = normalize(self.task.clip.encode_image(pixels, tensors["visual"]), dim=-1)
        texts = self.texts.features(tensors["context"]) if "context" in tensors else self.task.text_features
        return self.scale * images @ texts.T

    def diagnose(self, before: Sequence[Tensors], after: Sequence[Tensors]) -> dict[str, float]:
        """How far the clients' prompts move apart, in amount (eq. 6) and in direction (figure 3)."""
        figures = {}
        for name in ("visual", "context"):
            if len(after) > 1 and all(name in tensors for tensors in (*before, *after)):
                ends = [tensors[name].double().flatten() for tensors in after]
                moves = torch.stack(
                    [end - start[name].double().flatten() for start, end in zip(before, ends, strict=True)]
                )
                figures[f"drift_diversity_{name}"] = float(moves.pow(2).sum() / moves.sum(0).pow(2).sum())  # eq. 6
                cosines = [cosine_similarity(one, other, dim=0) for one, other in combinations(ends, 2)]
                figures[f"cosine_distance_{name}"] = float(1 - torch.stack(cosines).mean())
        return figures
