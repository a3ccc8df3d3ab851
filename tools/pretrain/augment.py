"""Random views of images, made for a whole batch at once on its device."""

import math

import torch
import torch.nn.functional as F

SMALLEST_CROP = 0.3  # of the area
LOW_RESOLUTION = 0.25  # share of images that lose half their resolution: small and blurred sources are common
JITTER = 0.4  # of brightness, contrast and saturation
GREY = 0.05  # share of images without colour


def augment(pixels: torch.Tensor) -> torch.Tensor:
    """n x 3 x H x W uint8 to [0, 1]: random resized crop, flip, low resolution, colour jitter."""
    count, device = pixels.shape[0], pixels.device
    x = pixels.float().div_(255)
    area = torch.empty(count, device=device).uniform_(SMALLEST_CROP, 1.0)
    ratio = torch.exp(torch.empty(count, device=device).uniform_(math.log(3 / 4), math.log(4 / 3)))
    width, height = (area * ratio).sqrt().clamp_(max=1), (area / ratio).sqrt().clamp_(max=1)
    centre_x = (torch.rand(count, device=device) * 2 - 1) * (1 - width)
    centre_y = (torch.rand(count, device=device) * 2 - 1) * (1 - height)
    flip = torch.where(torch.rand(count, device=device) < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(width)
    rows = [torch.stack([width * flip, zero, centre_x], 1), torch.stack([zero, height, centre_y], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, mode="bicubic", padding_mode="reflection", align_corners=False).clamp_(0, 1)

    low = torch.rand(count, device=device) < LOW_RESOLUTION
    halved = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bicubic", align_corners=False).clamp_(0, 1)
    x = torch.where(low.view(-1, 1, 1, 1), halved, x)

    def factor() -> torch.Tensor:
        return 1 + (torch.rand(count, 1, 1, 1, device=device) * 2 - 1) * JITTER

    x = x * factor()  # brightness
    level = x.mean((1, 2, 3), keepdim=True)
    x = (x - level) * factor() + level  # contrast
    grey = x.mean(1, keepdim=True)
    saturation = factor()
    colourless = torch.rand(count, 1, 1, 1, device=device) < GREY
    saturation = torch.where(colourless, torch.zeros_like(saturation), saturation)
    return ((x - grey) * saturation + grey).clamp_(0, 1)


def mix(x: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mix a share of the batch with random partners: half by CutMix (a box of the partner), half by mixup (a blend).

    Returns the images, each one's partner, and the weight (part of the pixels) of each one's own image.
    """
    count, size, device = x.shape[0], x.shape[-1], x.device
    partner = torch.randperm(count, device=device)
    mixed = torch.rand(count, device=device) < share
    by_box = torch.rand(count, device=device) < 0.5
    own = torch.rand(count, device=device)
    side = (1 - own).sqrt() * size
    centre_x, centre_y = torch.rand(count, device=device) * size, torch.rand(count, device=device) * size
    places = torch.arange(size, device=device).float()
    inside_x = (places[None] - centre_x[:, None]).abs() < side[:, None] / 2
    inside_y = (places[None] - centre_y[:, None]).abs() < side[:, None] / 2
    box = (inside_y[:, :, None] & inside_x[:, None, :]).float()
    blend = (1 - own)[:, None, None].expand_as(box)
    alpha = torch.where(by_box[:, None, None], box, blend) * mixed[:, None, None].float()
    return x * (1 - alpha[:, None]) + x[partner] * alpha[:, None], partner, 1 - alpha.mean((1, 2))
