"""Federations on made-up features for the tests of audits: everything leaks, or nothing does."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from fedvl.audit.evidence import Evidence, Message, Round, watch
from fedvl.config import DataConfig, Experiment, FederationConfig, MethodConfig, PrivacyConfig, TrainingConfig
from fedvl.display import Silent
from fedvl.methods import load_method
from fedvl.methods.base import Samples, Task
from fedvl.preparation import Training
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


def evidence_of(
    method: str = "linear",
    images: int = 20,
    rounds: int = 2,
    secure_sum: bool = False,
    privacy: PrivacyConfig | None = None,
    **settings: Any,
) -> Evidence:
    """Clients with unequal classes, watched; the attacker has images of all classes."""
    texts = normalize(torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0)), dim=-1)
    shares = np.random.default_rng(1).dirichlet([0.3] * CLASSES, CLIENTS)
    parts = [made_up(images, 10 + client, texts, shares[client]) for client in range(CLIENTS)]
    features = torch.cat([part.inputs["features"] for part in parts])
    labels = torch.cat([part.labels for part in parts])
    rows = list(torch.arange(len(labels)).split(images))
    kind = load_method(method)
    task = Task(
        tuple(f"class {c}" for c in range(CLASSES)), texts, encoder_of(logit_scale=10.0, name="made up"), CLIENTS
    )
    own, outside = made_up(OWN, 2, texts), made_up(OUTSIDE, 3, texts)
    counts = np.stack([np.bincount(part.labels, minlength=CLASSES) for part in parts])
    experiment = Experiment(
        method=MethodConfig(name=method),
        data=DataConfig(clients=CLIENTS),
        training=TrainingConfig(**{"learning_rate": 0.002, "batch_size": 50, **settings}),
        federation=FederationConfig(rounds=rounds, threads=1, secure_sum=secure_sum, least_clients=CLIENTS),
        privacy=privacy or PrivacyConfig(),
    )
    nothing: Any = None  # no dataset: features alone
    evidence = Evidence(
        experiment=experiment,
        method=kind(kind.options_type(), task),
        sources=nothing,
        encoded=nothing,
        training=Training(Samples({"features": features}, labels), rows, labels, counts, ""),
        slow=False,
        own=own,
        outside=outside,
        complete=(own, outside),
        own_rows=torch.arange(OWN),
        outside_rows=torch.arange(OUTSIDE),
    )
    return watch(evidence, CLIENTS, rounds, Silent())


def silenced(evidence: Evidence) -> Evidence:
    """The same federation, in which noise is sent in place of every change."""
    generator = torch.Generator().manual_seed(4)

    def noise(tensors: Any, before: Any) -> Any:
        return {
            name: before[name] + torch.randn(tensor.shape, generator=generator) if name in before else tensor
            for name, tensor in tensors.items()
        }

    def hushed(message: Message) -> Message:
        sent = message.update._replace(tensors=noise(message.update.tensors, message.before))
        return message._replace(update=sent)

    messages = [hushed(message) for message in evidence.messages]
    rounds = [Round(r.before, noise(r.after, r.before), r.weight, r.tailored) for r in evidence.rounds]
    return replace(evidence, messages=messages, rounds=rounds, answering=({**rounds[-1].after}, {}))
