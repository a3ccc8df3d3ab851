"""Federations on made-up features for the tests of audits: everything leaks, or nothing does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from fedvl.audit.evidence import Evidence, watch
from fedvl.audit.messages import Message
from fedvl.config import DataConfig, Experiment, FederationConfig, MethodConfig, PrivacyConfig, TrainingConfig
from fedvl.display import Silent
from fedvl.methods import load_method
from fedvl.methods.base import Samples, Task
from fedvl.runs.preparation import Prepared, Test, Training
from helpers.small import encoder_of

CLASSES, WIDTH, CLIENTS = 5, 64, 6
OWN, OUTSIDE = 200, 100


def made_up(count: int, seed: int, texts: torch.Tensor, shares: Any = None) -> Samples:
    """Features around their class's text; classes equally often, or by shares."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(CLASSES) if shares is None else torch.as_tensor(shares, dtype=torch.float)
    labels = torch.multinomial(weights, count, replacement=True, generator=generator)
    spread = torch.randn(count, WIDTH, generator=generator)
    features = normalize(texts[labels] + 0.2 * spread, dim=-1)
    return Samples({"features": features}, labels)


def class_texts() -> torch.Tensor:
    return normalize(torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0)), dim=-1)


def prepared_of(
    method: str | Path = "linear",
    images: int = 20,
    rounds: int = 2,
    privacy: PrivacyConfig | None = None,
    clients: int = CLIENTS,
    skew: float = 0.3,
    federation: dict[str, Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Prepared:
    """A run of clients with unequal classes, before its first round."""
    texts = class_texts()
    shares = np.random.default_rng(1).dirichlet([skew] * CLASSES, clients)
    parts = [made_up(images, 10 + client, texts, shares[client]) for client in range(clients)]
    features = torch.cat([part.inputs["features"] for part in parts])
    labels = torch.cat([part.labels for part in parts])
    rows = list(torch.arange(len(labels)).split(images))
    kind = load_method(str(method))
    names = tuple(f"class {c}" for c in range(CLASSES))
    task = Task(names, texts, encoder_of(logit_scale=10.0, name="made up"), clients)
    counts = np.stack([np.bincount(part.labels, minlength=CLASSES) for part in parts])
    made = kind(kind.options_type(), task)
    experiment = Experiment(
        seed=seed,
        method=MethodConfig(name=str(method)),
        data=DataConfig(clients=clients),
        training=TrainingConfig(**{"learning_rate": 0.002, "batch_size": 50, **settings}),
        federation=FederationConfig(**{"rounds": rounds, "threads": 1, "least_clients": clients, **(federation or {})}),
        privacy=privacy or PrivacyConfig(),
    )
    nothing: Any = None  # no dataset: features alone
    return Prepared(
        experiment=experiment,
        method=made,
        queried=made,
        for_new=None,
        training=Training(Samples({"features": features}, labels), rows, labels, counts, ""),
        test=Test(made_up(50, 9, texts), nothing, [], {}),
        class_names=list(names),
        templates=[],
        skipped=[],
        notes=[],
        encode_seconds=0.0,
        sources=nothing,
        encoded=nothing,
        assignment=nothing,
    )


def unwatched(prepared: Prepared) -> Evidence:
    """Images of all classes for the attacker, before anything is sent."""
    own, outside = made_up(OWN, 2, class_texts()), made_up(OUTSIDE, 3, class_texts())
    return Evidence(
        prepared=prepared,
        slow=False,
        own=own,
        outside=outside,
        complete=(own, outside),
        own_rows=torch.arange(OWN),
        outside_rows=torch.arange(OUTSIDE),
        summed=prepared.experiment.federation.secure_sum,
    )


def evidence_of(method: str | Path = "linear", rounds: int = 2, secure_sum: bool = False, **settings: Any) -> Evidence:
    """Clients with unequal classes, watched; the attacker has images of all classes."""
    federation = {**settings.pop("federation", {}), "secure_sum": secure_sum}
    prepared = prepared_of(method, rounds=rounds, federation=federation, **settings)
    return watch(unwatched(prepared), len(prepared.training.rows), rounds, Silent())


def silenced(evidence: Evidence, seed: int = 4) -> Evidence:
    """The same federation, in which noise is sent in place of every change."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensors: Any, before: Any) -> Any:
        return {
            name: before[name] + torch.randn(tensor.shape, generator=generator) if name in before else tensor
            for name, tensor in tensors.items()
        }

    def hushed(message: Message) -> Message:
        sent = message.update._replace(tensors=noise(message.update.tensors, message.before))
        return message._replace(update=sent, loss=float(torch.rand((), generator=generator)))

    messages = [hushed(message) for message in evidence.messages]
    rounds = [happened._replace(after=noise(happened.after, happened.before)) for happened in evidence.rounds]
    return replace(evidence, messages=messages, rounds=rounds, answering=({**rounds[-1].after}, {}), kept={})
