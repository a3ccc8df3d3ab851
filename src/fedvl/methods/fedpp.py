"""FedPP (anonymous, 2024): cooperative pseudo-labels, shared visual prompts, local text prompts.

Every few rounds clients count the classes of their reliable images; the totals say how many images
of each class every client labels (eq. 2 and 3, ``parts/pseudo_labels.py``). Each trains deep visual
prompts, averaged by numbers of labels used (eq. 4), and a text context that stays local (eq. 5).

Where the paper leaves a choice, or the code of its successor FedCoPL differs:

- Eq. 3 needs the class totals only, so a client computes its share and the server never sees its
  counts. ``counts = "sent"`` is the paper's form, in which it does; the numbers are the same. With
  ``"shares"`` clients report shares of classes, of bounded norm, which ``--privacy client`` needs.
- "r % Q = 0" leaves the first rounds without labels: they are made before rounds 1, Q + 1, 2 Q + 1
  and so on, first from the class texts and later from the client's own prompts. A client that has
  not trained yet, whose context is still as drawn, labels and answers by the class texts.
- Clients draw a text context each; the code gives all the same (``contexts = "same"``). With
  ``"averaged"`` the server averages contexts too: the paper's prompts without partial aggregation.
- The images of a class are chosen among those whose likeliest class it is: no image has two labels.
- Weight decay is the code's, and so are the restarts of the cosine every 5 rounds, of which the
  paper says nothing. The code's one optimiser leaks momentum between clients; ours is fresh.
- Prompts go to all layers but the last, 11 of 12 in the code, whatever the model.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.errors import FedVLError
from fedvl.methods.base import Batch, Method, Options, Samples, Task
from fedvl.methods.parts import pseudo_labels
from fedvl.methods.parts.cosines import cosine_scores
from fedvl.methods.parts.prompts import CONTEXT_DEVIATION, ClassTexts
from fedvl.methods.parts.selection import Selection
from fedvl.methods.roles import Private, Role, Shared
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

PREDICTED_AT_ONCE = 256  # when a client predicts all its images
SETTING = {
    "training": {
        "learning_rate": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.05,
        "batch_size": 64,
        "local_epochs": 10,
        "schedule": "cosine-restarts",
        "restart_rounds": 5,
    },
    "federation": {"rounds": 20, "drift": True},
    "evaluation": {"protocol": "personal", "batch_size": PREDICTED_AT_ONCE},
}


class FedPPOptions(Options):
    visual_prompts: bool = True
    """Train shared visual prompts; without them images are encoded once, and nothing is shared."""
    visual_tokens: int = Field(5, ge=1)
    """Visual prompts per layer."""
    visual_layers: Literal["all-but-last", "all"] = "all-but-last"
    """Layers that have visual prompts."""
    visual_rate: float = Field(1.0, gt=0)
    """Factor on the learning rate of the visual prompts."""
    text_prompts: bool = True
    """Train local text prompts; without them the class texts are fixed."""
    context: int = Field(16, ge=1)
    """Learned tokens before the class name."""
    words: str = ""
    """Initial words of the context, such as "a photo of a", repeated to its length; random if
    empty.
    """
    contexts: Literal["own", "same", "averaged"] = "own"
    """Whether each client draws its own context, all start from the same draw, or the server
    averages contexts.
    """
    interval: int = Field(5, ge=1)
    """Rounds Q between selections of labels; training.restart_rounds should be the same."""
    selection: Literal["cps", "fpl", "upl", "zero-shot"] = "cps"
    """Scheme that selects pseudo-labels."""
    shots: int = Field(16, ge=1)
    """Labels per class and client under fpl and upl."""
    filters: pseudo_labels.Filters = "both"
    """Medians that an image must exceed to be counted, eq. 2."""
    quota: pseudo_labels.Quota = "quarter"
    """M of eq. 3."""
    counts: Literal["summed", "sent", "shares"] = "summed"
    """What the server receives: the sum of counts, each client's counts, or the sum of clients'
    shares.
    """


class FedPP(Method):
    inputs = ("features", "pixels")
    labels = "none"
    scope = "row"
    through_encoder = True
    options: FedPPOptions
    presets = {"paper": SETTING, "released": {**SETTING, "method": {"quota": "mean-reliable", "contexts": "same"}}}

    def __init__(self, options: FedPPOptions, task: Task) -> None:
        super().__init__(options, task)
        layers = task.clip.vision_layers
        self.layers = max(layers - 1, 1) if options.visual_layers == "all-but-last" else layers
        if options.visual_prompts and not layers:
            raise FedVLError(
                f"The image tower of {task.clip.name} takes no prompts; use a ViT, or --set method.visual_prompts=false."
            )
        if not (options.visual_prompts or options.text_prompts):
            raise FedVLError("FedPP without visual and text prompts trains nothing; leave one of them on.")
        if options.text_prompts:
            self.texts = ClassTexts(task.clip, task.class_names, options.context, words=options.words)
        self.averages_contexts = options.text_prompts and options.contexts == "averaged"
        self.selection = Selection(
            self.table,
            len(task.class_names),
            task.clients,
            options.interval,
            options.selection,
            options.shots,
            options.filters,
            options.quota,
            summed=options.counts != "sent",
            shares=options.counts == "shares",
        )

    @classmethod
    def forms(cls, options: FedPPOptions) -> tuple[str, ...]:
        return cls.inputs if options.visual_prompts else ("features",)

    def roles(self) -> dict[str, Role]:
        context: Role = Shared() if self.averages_contexts else Private(trained=True)
        visual = Shared(rate=self.options.visual_rate)
        return {"visual": visual, "context": context, **self.selection.roles()}

    def consultation(self) -> Selection:
        return self.selection

    def start(self, generator: torch.Generator) -> Tensors:
        tensors: Tensors = {}
        if self.options.visual_prompts:
            shape = (self.layers, self.options.visual_tokens, self.task.clip.vision_width)
            drawn = CONTEXT_DEVIATION * torch.randn(shape, generator=generator)
            tensors["visual"] = drawn.to(self.task.text_embeddings)
        if self.averages_contexts:
            tensors["context"] = self.texts.start(generator)
        return tensors

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        kept = self.selection.join(samples)
        if not self.options.text_prompts or self.averages_contexts:
            return kept
        if self.options.contexts == "same":
            generator = torch_generator(self.task.seed, "context")
        context = self.texts.start(generator)
        return kept | {"context": context, "trained": context.new_zeros(())}  # 1 once the client has trained

    def table(self, round_index: int, tensors: Tensors, inputs: Tensors) -> Tensor:
        """Return class probabilities of all images: first by class texts, later by own prompts."""
        if round_index == 0:
            return pseudo_labels.probabilities(inputs["features"], self.task.text_features, self.scale)
        parts = zip(*(torch.split(tensor, PREDICTED_AT_ONCE) for tensor in inputs.values()), strict=True)
        scores = [self.predict(tensors, dict(zip(inputs, part, strict=True))) for part in parts]
        return torch.softmax(torch.cat(scores), dim=-1)

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        """Return the loss of eq. 5, and that the client has trained its own context."""
        mark = {"trained": torch.ones_like(tensors["trained"])} if "trained" in tensors else {}
        return self.loss({**tensors, **mark}, batch), mark

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        """Return g(P^v, P^t; x), trained by eq. 5; without a trained context, by class texts."""
        images = inputs["features"]
        if "visual" in tensors:
            pixels = self.task.clip.normalise(inputs["pixels"]).to(tensors["visual"].dtype)
            images = normalize(self.task.clip.encode_image(pixels, tensors["visual"]), dim=-1)
        texts = self.texts.features(tensors["context"]) if "context" in tensors else self.task.text_features
        if "trained" in tensors:
            texts = torch.where(tensors["trained"] > 0, texts, self.task.text_features.to(texts))
        kind = self.task.text_features.dtype
        return cosine_scores(self.scale, images.to(kind), texts.to(kind))
