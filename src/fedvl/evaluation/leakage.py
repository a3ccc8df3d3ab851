"""Gradient inversion by an honest-but-curious server: deep leakage (Zhu et al., 2019).

The attacker knows the model and the gradient of one image, and searches for pixels and a label with
the same gradient. For FedAvg on pixels (a small sigmoid network, as in that paper) it recovers the
image. For CacheFL the gradient reaches pixels only through the frozen encoder, and it finds noise.

That does not mean that nothing leaks: the gradient of each of CacheFL's keys is a multiple of the
image's feature, so the feature, and with it the class, is read off exactly (``feature_cosine``).
"""

import base64
import io
import math
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, normalize

from fedvl.methods.base import Method
from fedvl.methods.cachefl import CacheFL
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

IMAGE_SIDE = 24  # pixels of the attacked image
STEPS, INNER = 100, 3  # of L-BFGS, and iterations in each
SHOWN_EVERY = 20
FILTERS = 12

Loss = Callable[[Tensors, Tensor, Tensor], Tensor]  # of the trained tensors, an image (0 to 1) and class probabilities


def attack(method: Method, shared: Tensors, picture: Tensor, label: int) -> dict[str, Any]:
    """Attack the gradient that a client would send for one image (3 x SIDE x SIDE, 0 to 1)."""
    classes = len(method.task.class_names)
    generator = torch_generator(0, "leakage")
    loss: Loss = network_loss
    trained = network_start(classes, generator)
    if isinstance(method, CacheFL):
        loss, trained = keys_loss(method), {"keys": shared["keys"]}
    truth = torch.nn.functional.one_hot(torch.tensor([label]), classes).float()
    sent = gradient(loss, trained, picture[None], truth)
    found = invert(loss, trained, sent, classes, generator)
    result = {
        "panels": [as_png(picture), *(as_png(image) for image, _ in found)],
        "steps": [SHOWN_EVERY * number for number in range(len(found))],
        "psnr": [psnr(image, picture) for image, _ in found],
        "label_found": int(found[-1][1].argmax()) == label,
        "value": psnr(found[-1][0], picture),
        "value_is": "PSNR of the recovered image in dB",
    }
    if isinstance(method, CacheFL):
        result |= features_from_keys(method, sent[0], picture, label)
    return result


def features_from_keys(method: CacheFL, sent: Tensor, picture: Tensor, label: int) -> dict[str, Any]:
    """Read feature and class off the keys' gradients, all of which are multiples of the feature."""
    strongest = sent[sent.norm(dim=1).argmax()]
    feature = features(method, picture[None])[0]
    by_class = (sent @ strongest).view(len(method.task.class_names), -1).mean(1)
    # The gradients of the keys of the image's own class have the opposite sign.
    alone = by_class.argmax() if by_class.sign().sum() < 0 else by_class.argmin()
    cosine = float(torch.cosine_similarity(strongest, feature, dim=0).abs())
    return {"feature_cosine": cosine, "label_from_keys": int(alone) == label}


def gradient(loss: Loss, trained: Tensors, picture: Tensor, label: Tensor, again: bool = False) -> list[Tensor]:
    """Return what a client sends after one image; ``again`` allows a second derivative."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in trained.items()}
    return list(torch.autograd.grad(loss(leaves, picture, label), list(leaves.values()), create_graph=again))


def invert(
    loss: Loss, trained: Tensors, sent: list[Tensor], classes: int, generator: torch.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Return the image and label found every SHOWN_EVERY steps, starting with the random guess."""
    picture = torch.rand(1, 3, IMAGE_SIDE, IMAGE_SIDE, generator=generator).requires_grad_()
    label = torch.randn(1, classes, generator=generator).requires_grad_()
    optimiser = torch.optim.LBFGS([picture, label], lr=1.0, max_iter=INNER, tolerance_grad=0, tolerance_change=0)

    def closure() -> float:
        optimiser.zero_grad()
        ours = gradient(loss, trained, picture, torch.softmax(label, dim=-1), again=True)
        distance = torch.stack([(one - other).square().sum() for one, other in zip(ours, sent, strict=True)]).sum()
        distance.backward()  # type: ignore[no-untyped-call]
        return float(distance.detach())

    shown = [(picture.detach()[0].clone(), label.detach()[0].clone())]
    for step in range(1, STEPS + 1):
        optimiser.step(closure)  # type: ignore[no-untyped-call]
        if step % SHOWN_EVERY == 0:
            last = (picture.detach()[0].clone(), label.detach()[0].clone())
            shown.append(last if last[0].isfinite().all() else shown[-1])
    return shown


def network_start(classes: int, generator: torch.Generator) -> Tensors:
    """Initialise the paper's LeNet with wide weights, so that second derivatives do not vanish."""
    shapes: dict[str, tuple[int, ...]] = {"head": (classes, FILTERS * (IMAGE_SIDE // 4) ** 2)}
    for layer in range(3):
        shapes[f"conv{layer}"] = (FILTERS, FILTERS if layer else 3, 5, 5)
        shapes[f"bias{layer}"] = (FILTERS,)
    return {name: torch.rand(shape, generator=generator) - 0.5 for name, shape in shapes.items()}


def network_loss(tensors: Tensors, picture: Tensor, label: Tensor) -> Tensor:
    x = picture
    for layer, stride in enumerate((2, 2, 1)):
        x = torch.sigmoid(conv2d(x, tensors[f"conv{layer}"], tensors[f"bias{layer}"], stride, padding=2))
    return -(label * torch.log_softmax(x.flatten(1) @ tensors["head"].T, dim=-1)).sum()


def keys_loss(method: CacheFL) -> Loss:
    def loss(tensors: Tensors, picture: Tensor, label: Tensor) -> Tensor:
        scores = method.predict(tensors, {"features": features(method, picture)})
        return -(label * torch.log_softmax(scores, dim=-1)).sum()

    return loss


def features(method: Method, picture: Tensor) -> Tensor:
    """Encode an image of any size with the frozen encoder, differentiably."""
    encoder = method.task.clip
    side = encoder.image_size
    large = interpolate(picture, size=(side, side), mode="bilinear", align_corners=False)
    return normalize(encoder.encode_image(encoder.normalise(large)), dim=-1)


def psnr(found: Tensor, truth: Tensor) -> float:
    """Return the PSNR in dB after clamping pixels to [0, 1]."""
    error = float((found.clamp(0, 1) - truth).square().mean())
    return -10 * math.log10(max(error, 1e-10))


def as_png(picture: Tensor) -> str:
    """Return the image as a PNG data URI."""
    pixels = (picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
