"""ResNets: CLIP's frozen image tower (RN50 and larger), and ResNet-18/50 to train from scratch.

The latter are functions of named tensors, because clients train them batched under vmap.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedvl.errors import FedVLError
from fedvl.tensors import Tensors

EPSILON = 1e-5  # of every batch normalisation here

# --- CLIP's image tower ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResNetShape:
    """Sizes of CLIP's ResNet: channels after the stem, blocks per stage, and the final grid."""

    width: int
    blocks: tuple[int, int, int, int]
    grid: int

    @property
    def features(self) -> int:
        return 32 * self.width

    @property
    def image_size(self) -> int:
        return 32 * self.grid

    def tower(self, dim: int) -> nn.Module:
        return ModifiedResNet(self, dim)


class FrozenNorm(nn.Module):
    """Batch normalisation with the fixed statistics of pretraining."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(channels)), nn.Parameter(torch.empty(channels))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_var", torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=EPSILON)


class Bottleneck(nn.Module):
    """ResNet's bottleneck with CLIP's change: a stride is average pooling before a convolution."""

    def __init__(self, channels: int, planes: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv1, self.bn1 = nn.Conv2d(channels, planes, 1, bias=False), FrozenNorm(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False), FrozenNorm(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, 4 * planes, 1, bias=False), FrozenNorm(4 * planes)
        self.downsample = None
        if stride > 1 or channels != 4 * planes:
            self.downsample = nn.Sequential(nn.Conv2d(channels, 4 * planes, 1, bias=False), FrozenNorm(4 * planes))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        if self.stride > 1:
            x, y = F.avg_pool2d(x, self.stride), F.avg_pool2d(y, self.stride)
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class AttentionPool(nn.Module):
    """Multi-head attention pooling, with the mean over all positions as the query."""

    def __init__(self, positions: int, width: int, heads: int, dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.positional_embedding = nn.Parameter(torch.empty(positions + 1, width))
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.c_proj = nn.Linear(width, dim)

    def forward(self, x: Tensor, patches: bool) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([x.mean(1, keepdim=True), x], 1) + self.positional_embedding
        queries = x if patches else x[:, :1]
        query, key, value = (
            linear(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, y in ((self.q_proj, queries), (self.k_proj, x), (self.v_proj, x))
        )
        weights = ((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)).softmax(-1)
        pooled: Tensor = self.c_proj((weights @ value).transpose(1, 2).flatten(2))
        return pooled


class ModifiedResNet(nn.Module):
    """CLIP's ResNet: a stem of three convolutions, anti-aliased strides and attention pooling."""

    def __init__(self, shape: ResNetShape, dim: int) -> None:
        super().__init__()
        width = shape.width
        self.conv1, self.bn1 = nn.Conv2d(3, width // 2, 3, 2, 1, bias=False), FrozenNorm(width // 2)
        self.conv2, self.bn2 = nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False), FrozenNorm(width // 2)
        self.conv3, self.bn3 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False), FrozenNorm(width)
        channels = width
        for stage, count in enumerate(shape.blocks):
            planes = width * 2**stage
            blocks = []
            for block in range(count):
                blocks.append(Bottleneck(channels, planes, 2 if stage and not block else 1))
                channels = 4 * planes
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.attnpool = AttentionPool(shape.grid**2, shape.features, shape.features // 64, dim)

    def forward(self, pixels: Tensor, prompts: Tensor | None, patches: bool) -> Tensor:
        """Return n x d features, or n x (1 + M) x d with `patches`, the pooled one first."""
        if prompts is not None:
            raise FedVLError("A ResNet image tower takes no visual prompts: use a model with a ViT image tower.")
        x = pixels
        for conv, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)):
            x = F.relu(norm(conv(x)))
        x = F.avg_pool2d(x, 2)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        pooled: Tensor = self.attnpool(x, patches)
        return pooled if patches else pooled[:, 0]


# --- ResNet-18/50 to train from scratch -----------------------------------------------------------------------------

BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
MOMENTUM = 0.1


def initial(depth: int, classes: int, generator: torch.Generator, width: int = 64) -> Tensors:
    """Return weights and running statistics of a new network, under torchvision's names.

    `width` is the number of channels after the stem.
    """
    if depth not in BLOCKS:
        raise FedVLError(f"There is no ResNet of depth {depth}: choose 18 or 50.")
    tensors: Tensors = {}

    def convolution(name: str, channels: int, planes: int, size: int) -> None:
        # He et al. 2015, by fan-out
        spread = sqrt(2 / (planes * size * size))
        tensors[f"{name}.weight"] = torch.randn(planes, channels, size, size, generator=generator) * spread

    def norm(name: str, channels: int) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = torch.ones(channels), torch.zeros(channels)
        tensors[f"{name}.running_mean"], tensors[f"{name}.running_var"] = torch.zeros(channels), torch.ones(channels)

    convolution("conv1", 3, width, 7)
    norm("bn1", width)
    channels, expansion = width, 4 if depth == 50 else 1
    for stage, count in enumerate(BLOCKS[depth]):
        planes = width * 2**stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            sizes = ((planes, 1), (planes, 3), (4 * planes, 1)) if depth == 50 else ((planes, 3), (planes, 3))
            inner = channels
            for index, (outer, size) in enumerate(sizes, 1):
                convolution(f"{name}.conv{index}", inner, outer, size)
                norm(f"{name}.bn{index}", outer)
                inner = outer
            if block == 0 and (stage or channels != expansion * planes):
                convolution(f"{name}.downsample.0", channels, expansion * planes, 1)
                norm(f"{name}.downsample.1", expansion * planes)
            channels = expansion * planes
    bound = 1 / sqrt(channels)
    tensors["fc.weight"] = torch.empty(classes, channels).uniform_(-bound, bound, generator=generator)
    tensors["fc.bias"] = torch.zeros(classes)
    return tensors


def forward(tensors: Tensors, images: Tensor, training: bool, present: Tensor | None = None) -> tuple[Tensor, Tensors]:
    """Return features, n x 512 (or 2048), and the running statistics that training changed.

    images: n x 3 x H x W. present: n weights of 0 or 1; a padding image (0) does not enter the
    batch statistics.
    """
    changed: Tensors = {}

    def normalised(x: Tensor, name: str) -> Tensor:
        mean, variance = tensors[f"{name}.running_mean"], tensors[f"{name}.running_var"]
        if training:
            weight = torch.ones(x.shape[0], device=x.device) if present is None else present.to(x.dtype)
            count = (weight.sum() * x.shape[2] * x.shape[3]).clamp(min=1)
            old_mean, old_variance = mean, variance
            weight = weight[:, None, None, None]
            mean = (x * weight).sum((0, 2, 3)) / count
            variance = ((x - mean[:, None, None]).square() * weight).sum((0, 2, 3)) / count
            unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
            changed[f"{name}.running_mean"] = (1 - MOMENTUM) * old_mean + MOMENTUM * mean.detach()
            changed[f"{name}.running_var"] = (1 - MOMENTUM) * old_variance + MOMENTUM * unbiased
        scale = tensors[f"{name}.weight"] * (variance + EPSILON).rsqrt()
        shift = tensors[f"{name}.bias"] - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]

    def convolved(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = tensors[f"{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    x = F.relu(normalised(convolved(images, "conv1", 2), "bn1"))
    x = F.max_pool2d(x, 3, 2, 1)
    deep = "layer1.0.conv3.weight" in tensors
    for stage, count in enumerate(BLOCKS[50 if deep else 18]):
        for block in range(count):
            name, stride = f"layer{stage + 1}.{block}", 2 if stage and not block else 1
            y = x
            for index in range(1, 4 if deep else 3):
                # The stride sits in the 3 x 3 convolution: the second of a bottleneck, the first of a basic block.
                step = stride if index == (2 if deep else 1) else 1
                y = normalised(convolved(y, f"{name}.conv{index}", step), f"{name}.bn{index}")
                if index < (3 if deep else 2):
                    y = F.relu(y)
            if f"{name}.downsample.0.weight" in tensors:
                x = normalised(convolved(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
            x = F.relu(x + y)
    return x.mean((2, 3)), changed


def head_scores(tensors: Tensors, features: Tensor) -> Tensor:
    """Return n x classes logits of the features."""
    return F.linear(features, tensors["fc.weight"], tensors["fc.bias"])
