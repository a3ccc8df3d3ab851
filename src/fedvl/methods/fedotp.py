"""FedOTP (Li et al., 2024; elsewhere FedOPT): a global and a local context share the patches.

Each client learns two contexts: one that the server averages by numbers of samples, and one that
stays local. For each image and class, an optimal transport plan assigns patches to the two texts of
the class; only the share ``mass`` of the patches need be assigned, so background counts for
neither. The class's score is the similarity that the plan collects.

Where there is a choice:

- A local context is drawn when a client joins, then trained; a client without data has none.
  Without one (a user under the closed or open protocol) the global context has all the mass. The
  paper's accuracy is that of the personal protocol, in which clients query with both.
- The released code stops the scaling when it hardly moves, or after 100 iterations; we always run
  ``iterations``. With the embedded model at epsilon 0.1 the plan is exact to 32-bit rounding after
  50; at the few-shot script's 0.01, scores are off by up to 0.0004 after 100, a tenth after 200.
- The released code drops a batch whose plan is NaN; in the log domain there is none.
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.methods.base import Batch, Method, Options, Samples, Task
from fedvl.methods.parts.cosines import cosine_scores
from fedvl.methods.parts.losses import label_loss
from fedvl.methods.parts.prompts import ClassTexts
from fedvl.methods.parts.transport import balanced_plan, partial_plan
from fedvl.methods.roles import Private, Role
from fedvl.tensors import Tensors

TRAINING = {"learning_rate": 0.001, "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 32}
SIMILARITIES_AT_ONCE = 2**24  # in prediction; in training the batch bounds them


class FedOTPOptions(Options):
    context: int = Field(16, ge=1)
    """Learned tokens before the class name; the released code has 4 for CIFAR."""
    words: str = ""
    """Initial words of both contexts, repeated to their length; random if empty."""
    mass: float = Field(0.8, gt=0, le=1)
    """Share gamma of the patches that is assigned; 1 is balanced transport."""
    epsilon: float = Field(0.1, gt=0)
    """Weight of the entropy in the transport problem."""
    iterations: int = Field(100, ge=1)
    """Iterations of the scaling algorithm."""


class FedOTP(Method):
    inputs = ("patches",)
    labels = "candidates"
    vocabulary = "any"
    scope = "row"
    through_encoder = True
    options: FedOTPOptions
    presets = {"paper": {"training": TRAINING, "federation": {"rounds": 10}, "evaluation": {"protocol": "personal"}}}

    def __init__(self, options: FedOTPOptions, task: Task) -> None:
        super().__init__(options, task)
        self.texts = ClassTexts(task.clip, task.class_names, options.context, words=options.words)

    def roles(self) -> dict[str, Role]:
        return {"local_context": Private(trained=True)}

    def start(self, generator: torch.Generator) -> Tensors:
        return {"context": self.texts.start(generator)}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        return {"local_context": self.texts.start(generator)}

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        return label_loss(self.scores(self.class_texts(tensors), batch.inputs["patches"]), batch)

    def class_texts(self, tensors: Tensors) -> Tensor:
        """Return unit vectors, classes x contexts x d: global context first, then a local one."""
        contexts = torch.stack([tensors[name] for name in ("context", "local_context") if name in tensors])
        return torch.func.vmap(self.texts.features, out_dims=1)(contexts)

    def scores(self, texts: Tensor, patches: Tensor) -> Tensor:
        """Return scale <T, S> (rows x classes) of cosines S and the plan T at the cost 1 - S."""
        classes, contexts, _ = texts.shape
        similarity = cosine_scores(1.0, texts.float().flatten(0, 1), normalize(patches.float(), dim=-1))
        similarity = similarity.reshape(len(patches), classes, contexts, -1)
        return self.scale * (self.plan(similarity) * similarity).sum((-2, -1))

    def plan(self, similarity: Tensor) -> Tensor:
        """Return a plan with equal mass for each context and at most 1/M from each of M patches."""
        *_, contexts, patches = similarity.shape
        to_contexts = torch.full((contexts,), self.options.mass / contexts, device=similarity.device)
        from_patches = torch.full((patches,), 1 / patches, device=similarity.device)
        solve = partial_plan if self.options.mass < 1 else balanced_plan
        return solve(1 - similarity, to_contexts, from_patches, self.options.epsilon, self.options.iterations)

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        texts = self.class_texts(tensors)
        patches = inputs["patches"]
        rows = max(1, SIMILARITIES_AT_ONCE // (texts.shape[0] * texts.shape[1] * patches.shape[-2]))
        return torch.cat([self.scores(texts, part) for part in torch.split(patches, rows)])
