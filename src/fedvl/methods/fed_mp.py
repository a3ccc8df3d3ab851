"""Fed-MP (Zeng et al., 2024): a gate on image embeddings, merged for each query, and prototypes.

Clients train FedCLIP's gate against class texts perturbed by their own residuals (eq. 3 to 5). The
server keeps all gates and weights them by how near the clients' texts are to the queried names (eq.
7 to 9). Confident images are examples for later ones (eq. 10 to 13, ``parts/prototypes.py``).

Where the paper leaves a choice:

- Eq. 5 has bare products; like the released code, we use cosines times the model's scale. Gate
  values are near 1/d, so bare products hardly differ: at the paper's rate the loss stays at chance.
- Eq. 6 has no alpha. We send what was trained (eq. 4, and the released code).
- No query is known in training: a round starts from the mean gate; only predictions are tailored.
- The preset's AdamW has no weight decay; the paper names none, and PyTorch's default is 0.01.
- Of 10 images a class, 2 are for validation, which nothing here needs: 8 are kept (``data.shots``).
- A client sends the mean of its unit vectors, all that eq. 8 needs; one per class reveals names.
  The mean reveals less, without guarantee: names near the mean of few can be guessed.
- With ``merging = "summed"`` clients send no texts, and the server keeps sums over clients alone,
  from which eq. 9 follows to first order (``parts/query_sums.py``).
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.errors import FedVLError
from fedvl.methods.base import Answer, Batch, Mean, Method, Options, Samples, Task
from fedvl.methods.parts import prototypes, query_sums
from fedvl.methods.parts.adapters import gate_start, gated
from fedvl.methods.parts.losses import contrastive
from fedvl.methods.parts.prototypes import Empty
from fedvl.methods.roles import Private, Remembered, Role, Sent, Shared
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

GATE = ("gate.0.weight", "gate.0.bias", "gate.1.weight", "gate.1.bias")


class FedMPOptions(Options):
    alpha: float = Field(0.3, ge=0)
    """Weight of the residuals, eq. 4."""
    residual_range: float = Field(5.0, ge=0)
    """Residuals start uniform within plus or minus this value; the paper does not give one."""
    residuals: Literal["own", "common"] = "own"
    """own: each client draws residuals once and keeps them; common: all clients share one draw, new
    each round.
    """
    directions: Literal["summed", "averaged"] = "summed"
    """How the image-to-text and text-to-image losses are combined, eq. 5."""
    share: Literal["mean", "classes"] = "mean"
    """What a client sends of its perturbed texts, eq. 6: their mean, or one vector per class."""
    adaptive: bool = True
    """Merge the gates for the queried classes; otherwise the mean gate answers every query."""
    weights: Literal["exp", "linear"] = "exp"
    """How similarities become weights, eq. 9."""
    merging: Literal["kept", "summed"] = "kept"
    """kept: eq. 9 from each client's stored gate; summed: its first-order form, from sums over
    clients alone.
    """
    query_directions: int = Field(4, ge=1)
    """Directions of the class texts in which merging = summed distinguishes clients."""
    prototypes: bool = True
    """Use confident test images as examples for later queries, eq. 10 to 13."""
    uncertainty: float = Field(0.2, ge=0, le=1)
    """Epsilon of eq. 11, as a share of the maximum entropy."""
    pseudo_labels: Literal["text", "combined"] = "text"
    """Scores that decide whether an image becomes an example: by text alone, or combined with
    examples.
    """
    empty: Empty = "levelled"
    """How a class without examples is scored."""
    unit_centroids: bool = True
    """Use cos(z', q) in eq. 12; otherwise the product with the unnormalised mean."""


class FedMP(Method):
    inputs = ("embeddings",)
    vocabulary = "any"
    weighting = "clients"  # no query is known in training: all clients count equally
    options: FedMPOptions
    presets = {
        "paper": {
            "training": {"optimiser": "adamw", "learning_rate": 1e-5, "batch_size": 18, "local_epochs": 2},
            "federation": {"rounds": 2},
            "data": {"shots": 8, "templates": "bare"},
            "evaluation": {"protocol": "open", "batch_size": 18},
        },
        "released": {
            "method": {
                "residuals": "common",
                "directions": "averaged",
                "weights": "linear",
                "uncertainty": 0.1,
                "pseudo_labels": "combined",
                "empty": "all-or-nothing",
                "unit_centroids": False,
            },
            "training": {
                "optimiser": "adam",
                "learning_rate": 5e-5,
                "betas": (0.9, 0.98),
                "epsilon": 1e-6,
                "weight_decay": 0.2,
                "batch_size": 18,
                "local_epochs": 2,
            },
            "federation": {"rounds": 2},
            "data": {"shots": 8, "templates": "bare"},
            "evaluation": {"protocol": "open", "batch_size": 18},
        },
    }

    def __init__(self, options: FedMPOptions, task: Task) -> None:
        super().__init__(options, task)
        self.tilts = options.merging == "summed" and options.adaptive
        if self.tilts and options.weights == "linear":
            raise FedVLError(
                'Sums over clients give the weights of eq. 9 as published; use method.weights="exp" with '
                'method.merging="summed", or method.adaptive=false.'
            )

    def roles(self) -> dict[str, Role]:
        """Keep every client's last gate and texts to merge for a query (eq. 7 to 9), or sums."""
        classes, width = self.task.text_embeddings.shape
        shape = (range(1, classes + 1) if self.options.share == "classes" else 1, width)
        roles: dict[str, Role] = {"residuals": Private(trained=True, lasts=self.options.residuals == "own")}
        if self.options.merging == "kept":
            roles |= {"perturbed_texts": Sent(self.perturbed_texts, shape, needs="last"), "*": Shared(needs="last")}
        if self.tilts:
            roles[query_sums.DIRECTIONS] = Shared(trained=False)
            roles[query_sums.PLACE] = Shared(trained=False, end=self.place)
            for name in GATE:
                roles[f"{query_sums.TILT}{name}"] = Shared(trained=False, end=self.tilt)
        return roles | ({"sums": Remembered(), "counts": Remembered()} if self.options.prototypes else {})

    def start(self, generator: torch.Generator) -> Tensors:
        texts = self.task.text_embeddings
        gate = gate_start(texts.shape[1], generator)
        return gate | (query_sums.first_places(gate, texts, self.options.query_directions) if self.tilts else {})

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        """Draw a residual for each class that the client has; other rows are never used."""
        if self.options.residuals == "common":  # released code: the j-th class starts equal in all clients
            generator = torch_generator(self.task.seed, "residuals")
        own = torch.unique(samples.labels)
        residuals = torch.zeros_like(self.task.text_embeddings)
        drawn = torch.empty(len(own), residuals.shape[1])
        drawn.uniform_(-self.options.residual_range, self.options.residual_range, generator=generator)
        residuals[own] = drawn.to(residuals.device)
        return {"residuals": residuals}

    def perturbed(self, residuals: Tensor, classes: Tensor) -> Tensor:
        """Return t' = t + alpha delta (eq. 4)."""
        return self.task.text_embeddings[classes] + self.options.alpha * residuals[classes]

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        texts = self.perturbed(tensors["residuals"], batch.labels.clamp(min=0))
        loss = contrastive(gated(tensors, batch.inputs["embeddings"]), texts, self.scale, batch.mask)  # eq. 5
        return 2 * loss if self.options.directions == "summed" else loss

    def perturbed_texts(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        """Return T' of the client's classes as unit vectors (eq. 6), or their mean."""
        vectors = self.unit_texts(tensors, samples)
        return vectors if self.options.share == "classes" else vectors.mean(0, keepdim=True)

    def unit_texts(self, tensors: Tensors, samples: Samples) -> Tensor:
        return normalize(self.perturbed(tensors["residuals"], torch.unique(samples.labels)), dim=-1)

    def place(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        """Return where the client's perturbed texts are among the directions, for a sum."""
        return query_sums.place_of(tensors[query_sums.DIRECTIONS], self.unit_texts(tensors, samples))

    def tilt(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        """Return a sum of products that the client's own has been added to."""
        gate = name.removeprefix(query_sums.TILT)
        place = self.place(query_sums.PLACE, tensors, received, samples)
        return tensors[name] + query_sums.times(place, tensors[gate] - received[gate])

    def step(self, shared: Tensors, mean: Mean) -> Tensors:
        """Make of the sums what queries need."""
        return query_sums.settled(shared, mean) if self.tilts else mean

    def client_weights(self, last: dict[int, Tensors]) -> dict[int, float]:
        """Weight clients by how near their texts are to this task's (eq. 8 and 9); the sum is 1."""
        if not self.options.adaptive:
            return {}
        texts = torch.stack([sent["perturbed_texts"].mean(0) for sent in last.values()])
        similarity = texts.double() @ self.task.text_features.double().mean(0)  # the mean of all pairs' cosines, eq. 8
        similarity = similarity.clamp(-1, 1)  # honest clients are within; long vectors must not buy influence
        weights = torch.softmax(similarity, dim=0)
        if self.options.weights == "linear":
            positive = similarity.clamp(min=0)  # else weights are unbounded where similarities cancel out
            total = positive.sum()
            weights = positive / total if total > 1e-6 else torch.full_like(positive, 1 / len(positive))
        return dict(zip(last, weights.tolist(), strict=True))

    def adapted(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        """Return z' / |z'| (eq. 3), by the gate merged for this task where it is of sums."""
        gate = query_sums.tailored_to_query(tensors, self.task.text_features.mean(0)) if self.tilts else tensors
        return normalize(gated(gate, inputs["embeddings"]), dim=-1)

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        """Score images by text alone, without a session (eq. 1)."""
        return self.scale * self.adapted(tensors, inputs) @ self.task.text_features.T

    def answer(self, tensors: Tensors, session: Tensors, inputs: Tensors) -> Answer:
        """Score with the examples of earlier batches, then admit new ones (algorithm 2)."""
        if not self.options.prototypes:
            return super().answer(tensors, session, inputs)
        texts = self.task.text_features
        session = session or prototypes.begin_session(texts)
        prototypes.check_session(session, texts)
        images = self.adapted(tensors, inputs)
        combined = self.scale * prototypes.prototype_scores(
            images, texts, session, self.options.empty, self.options.unit_centroids
        )
        by_text = self.scale * images @ texts.T
        verdict = prototypes.judge(
            by_text if self.options.pseudo_labels == "text" else combined, self.options.uncertainty
        )
        session = prototypes.admit_prototypes(session, images, verdict)
        return Answer(combined, session, verdict.entropy, torch.where(verdict.admitted, verdict.labels, -1))
