"""FedMGP (Bo et al., 2025): groups of text and visual prompts, of which a few are drawn and shared.

Each client keeps several groups: a context for class names and tokens beside an image's patches. A
class's score is the mean of the groups' scores, and a diversity loss drives groups apart. After its
training a client draws a few groups, likelier the more alike they are to what the server handed
out, and sends these. The server averages the first of each client, the second of each, and so on;
in the next round the means replace the groups that were drawn. In a client's first round all groups
are equally likely. A new user is answered by the means alone.

Where there is a choice:

- A drawn group is a pair. The released code draws text and visual prompts apart.
- The diversity loss is the mean cosine between groups, of the texts of a class and of the features
  of an image. The released code adds one minus that, which makes groups alike
  (``diversity = "one-minus"``); its other distances do so too.
- The released configuration's distance is ``l1``: it adds the mean |f_i - f_j| of two groups.
- The paper weights clients by their numbers of samples; the released code does not (``weights``).
- The released code tokenises "a photo of a NAME." and learns the first tokens, as many as the
  context: "of a" stays (``tail``).
- All groups begin as the same words with a little noise, as in the released code.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, one_hot

from fedvl.config import Settings
from fedvl.errors import FedVLError
from fedvl.methods.base import Batch, Method, Options, Samples, Task
from fedvl.methods.parts.cosines import cosine_scores
from fedvl.methods.parts.losses import label_loss, masked_mean
from fedvl.methods.parts.prompts import CONTEXT_DEVIATION, ClassTexts
from fedvl.methods.roles import Private, Role, Shared
from fedvl.seeding import Draw, Uniform
from fedvl.tensors import Tensors

NOISE = 0.01  # on the words that a context begins as
SETTING: dict[str, Settings] = {
    "training": {"learning_rate": 0.001, "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 8, "local_epochs": 2},
    "federation": {"rounds": 10},
    "evaluation": {"protocol": "personal"},
}


class FedMGPOptions(Options):
    groups: int = Field(5, ge=1)
    """Prompt groups that a client keeps."""
    sent: int = Field(2, ge=1)
    """Prompt groups that a client sends."""
    context: int = Field(2, ge=1)
    """Learned tokens before the class name in each group."""
    words: str = "a photo of a"
    """Initial contexts, repeated or cut to their length; random if empty."""
    tail: str = "of a"
    """Fixed words between context and class name."""
    visual_tokens: int = Field(2, ge=0)
    """Visual prompts in each group; with 0, images are encoded only once."""
    diversity: Literal["cosine", "one-minus", "l1"] = "cosine"
    """Term of the loss: the cosine of groups, which drives them apart, or a distance, which makes
    them alike: one minus the cosine, or the mean absolute difference.
    """
    diversity_weight: float = Field(1.0, ge=0)
    """Weight lambda of the diversity loss."""
    weights: Literal["samples", "clients"] = "samples"
    """Weights of clients in the mean: their numbers of images, or equal."""
    temperature: float = Field(1.0, gt=0)
    """Temperature tau of the draw of groups."""


class FedMGP(Method):
    inputs = ("features", "pixels")
    labels = "candidates"
    vocabulary = "any"
    scope = "row"
    through_encoder = True
    options: FedMGPOptions
    presets = {"paper": SETTING, "released": {**SETTING, "method": {"diversity": "l1", "weights": "clients"}}}

    def __init__(self, options: FedMGPOptions, task: Task) -> None:
        super().__init__(options, task)
        if options.sent > options.groups:
            raise FedVLError(f"A client has {options.groups} groups and cannot send {options.sent}; lower method.sent.")
        if options.visual_tokens and not task.clip.vision_layers:
            raise FedVLError(
                f"The image tower of {task.clip.name} takes no prompts; use a ViT, or --set method.visual_tokens=0."
            )
        self.weighting = options.weights
        names = [f"{options.tail} {name}".lstrip() for name in task.class_names]
        self.texts = ClassTexts(task.clip, names, options.context, words=options.words)
        self.kinds = ("text", "visual") if options.visual_tokens else ("text",)

    @classmethod
    def forms(cls, options: FedMGPOptions) -> tuple[str, ...]:
        return cls.inputs if options.visual_tokens else ("features",)

    def roles(self) -> dict[str, Role]:
        roles: dict[str, Role] = {"chosen": Private(end=self.choose), "draws": Private(lasts=False)}
        for kind in self.kinds:
            roles[kind] = Shared(end=self.send)
            roles[f"own.{kind}"] = Private(trained=True, end=self.keep)
        return roles

    def start(self, generator: torch.Generator) -> Tensors:
        return self.drawn(self.options.sent, generator)

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        own = {f"own.{kind}": tensor for kind, tensor in self.drawn(self.options.groups, generator).items()}
        like = self.task.text_embeddings
        chosen = like.new_zeros(self.options.sent, self.options.groups)
        return {**own, "chosen": chosen, "draws": like.new_zeros(self.options.groups)}

    def drawn(self, count: int, generator: torch.Generator) -> Tensors:
        """Draw as many groups."""
        shape = (self.options.visual_tokens, self.task.clip.vision_width)
        text = [self.texts.start(generator) for _ in range(count)]
        noise = torch.randn(count, *text[0].shape, generator=generator) * (NOISE if self.options.words else 0)
        visual = CONTEXT_DEVIATION * torch.randn(count, *shape, generator=generator)
        found = {"text": torch.stack(text) + noise.to(text[0]), "visual": visual}
        return {kind: found[kind].to(self.task.text_embeddings) for kind in self.kinds}

    def noise(self) -> dict[str, Draw]:
        return {"draws": Uniform((self.options.groups,))}

    def groups(self, kind: str, tensors: Tensors) -> Tensor:
        """Return a client's groups, the server's means in place of those that it drew last."""
        if "chosen" not in tensors:
            return tensors[kind]
        replaced = tensors["chosen"].sum(0)[:, None, None]
        means = torch.einsum("sg,spw->gpw", tensors["chosen"], tensors[kind])
        return (1 - replaced) * tensors[f"own.{kind}"] + means

    def choose(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        """Draw groups by the softmax of their largest cosine with a received one: sent x groups."""
        pairs = [(self.groups(kind, tensors), received[kind]) for kind in self.kinds]
        cosines = [cosine_similarity(own.flatten(1)[:, None], means.flatten(1), dim=-1) for own, means in pairs]
        known = tensors["chosen"].amax()  # 0 in the first round
        logits = known * torch.stack(cosines).mean(0).amax(-1) / self.options.temperature
        drawn = (logits + tensors["draws"]).topk(self.options.sent).indices
        return one_hot(drawn, self.options.groups).to(logits)

    def send(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        chosen = self.choose("chosen", tensors, received, samples)
        return torch.einsum("sg,gpw->spw", chosen, self.groups(name, tensors))

    def keep(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        return self.groups(name.removeprefix("own."), tensors)

    def features(self, tensors: Tensors, inputs: Tensors) -> tuple[Tensor, Tensor]:
        """Return each group's image features (groups x rows x d) and texts (groups x C x d)."""
        texts = torch.func.vmap(self.texts.features)(self.groups("text", tensors))
        if "visual" not in self.kinds:
            return inputs["features"].expand(len(texts), -1, -1), texts
        visual = self.groups("visual", tensors)
        pixels = self.task.clip.normalise(inputs["pixels"]).to(visual.dtype)
        images = torch.func.vmap(lambda tokens: self.task.clip.encode_image(pixels, tokens=tokens))(visual)
        return normalize(images.to(texts.dtype), dim=-1), texts

    def scores(self, images: Tensor, texts: Tensor) -> Tensor:
        return cosine_scores(self.scale, images, texts)

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        """Return the loss, and the noise for the draw when training ends."""
        return self.loss(tensors, batch), {"draws": gumbel(batch.noise["draws"])}

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        images, texts = self.features(tensors, batch.inputs)
        losses = torch.stack([label_loss(scores, batch) for scores in self.scores(images, texts)])
        return losses.mean() + self.options.diversity_weight * self.diversity(images, texts, batch.mask)

    def diversity(self, images: Tensor, texts: Tensor, mask: Tensor) -> Tensor:
        """Return the mean cosine between groups, or a distance; 0 for a single group."""
        if len(texts) == 1:
            return texts.new_zeros(())
        compare = distance_of_groups if self.options.diversity == "l1" else mean_cosine
        found = [compare(texts).mean()]
        if "visual" in self.kinds:
            found.append(masked_mean(compare(images), mask))
        mean = torch.stack(found).mean()
        return 1 - mean if self.options.diversity == "one-minus" else mean

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return self.scores(*self.features(tensors, inputs)).mean(0)


def mean_cosine(vectors: Tensor) -> Tensor:
    """Return the mean cosine of each row's unit vectors in two groups (groups x rows x d)."""
    count = len(vectors)
    return (vectors.sum(0).square().sum(-1) - count) / (count * (count - 1))  # all pairs but a group with itself


def distance_of_groups(vectors: Tensor) -> Tensor:
    """Return the mean |f_i - f_j| over pairs of groups i < j and components, for each row."""
    first, second = torch.triu_indices(len(vectors), len(vectors), 1)
    return (vectors[first] - vectors[second]).abs().mean((0, -1))


def gumbel(uniform: Tensor) -> Tensor:
    """Return Gumbel noise: the largest of logits plus it are a draw without replacement."""
    return -torch.log(-torch.log(uniform))
