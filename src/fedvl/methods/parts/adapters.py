"""Small networks on top of frozen features."""

import torch
from torch import Tensor

from fedvl.tensors import Tensors


def linear_layer(inputs: int, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw weight and bias as PyTorch's linear layers do: uniform within 1/sqrt(inputs)."""
    bound = inputs**-0.5
    weight = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=generator)
    return weight, torch.empty(outputs).uniform_(-bound, bound, generator=generator)


def gate_start(width: int, generator: torch.Generator) -> Tensors:
    """Draw the gate of FedCLIP and Fed-MP: two layers of width d, 2(d^2 + d) values."""
    first, first_bias = linear_layer(width, width, generator)
    second, second_bias = linear_layer(width, width, generator)
    return {"gate.0.weight": first, "gate.0.bias": first_bias, "gate.1.weight": second, "gate.1.bias": second_bias}


def gated(tensors: Tensors, embeddings: Tensor) -> Tensor:
    """Return z' = softmax(W1 tanh(W0 z + b0) + b1) * z (FedCLIP; Fed-MP, eq. 3)."""
    hidden = torch.tanh(embeddings @ tensors["gate.0.weight"].T + tensors["gate.0.bias"])
    gate = torch.softmax(hidden @ tensors["gate.1.weight"].T + tensors["gate.1.bias"], dim=-1)
    return gate * embeddings


def bottleneck_start(width: int, reduction: int, generator: torch.Generator) -> Tensors:
    """Draw CLIP-Adapter's two layers without biases, d -> d/reduction -> d."""
    hidden = max(width // reduction, 1)
    down, _ = linear_layer(width, hidden, generator)
    up, _ = linear_layer(hidden, width, generator)
    return {"down.weight": down, "up.weight": up}


def bottleneck(tensors: Tensors, features: Tensor) -> Tensor:
    """Return relu(relu(z D^T) U^T) of CLIP-Adapter; the caller adds the residual."""
    hidden = torch.relu(features @ tensors["down.weight"].T)
    return torch.relu(hidden @ tensors["up.weight"].T)
