"""The two frozen teachers: an ImageNet ResNet-50 for images and all-MiniLM-L6-v2 for text."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

# Names and widths of the blocks of each stage, numbered as Keras does: 2a, 2b, 2c, 3a, ...
STAGES = (
    ("abc", (64, 64, 256)),
    ("abcd", (128, 128, 512)),
    ("abcdef", (256, 256, 1024)),
    ("abc", (512, 512, 2048)),
)
KERAS_EPSILON = 1e-3
KERAS_MEAN = (103.939, 116.779, 123.68)  # blue, green, red, of pixels in 0..255
MAX_STRING = 64  # tokens


class Bottleneck(nn.Module):
    """The first version of ResNet's block: its stride is in the first 1 x 1 convolution."""

    def __init__(self, inputs: int, widths: tuple[int, int, int], stride: int, projected: bool) -> None:
        super().__init__()
        first, second, third = widths
        self.c1, self.b1 = nn.Conv2d(inputs, first, 1, stride), nn.BatchNorm2d(first, KERAS_EPSILON)
        self.c2, self.b2 = nn.Conv2d(first, second, 3, 1, 1), nn.BatchNorm2d(second, KERAS_EPSILON)
        self.c3, self.b3 = nn.Conv2d(second, third, 1), nn.BatchNorm2d(third, KERAS_EPSILON)
        self.projected = projected
        if projected:
            self.cp, self.bp = nn.Conv2d(inputs, third, 1, stride), nn.BatchNorm2d(third, KERAS_EPSILON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.b1(self.c1(x)))
        y = self.b3(self.c3(F.relu(self.b2(self.c2(y)))))
        return F.relu(y + (self.bp(self.cp(x)) if self.projected else x))


class ResNet50(nn.Module):
    """Keras' ResNet-50 (v1). Reads RGB in [0, 1]; returns the pooled feature and the class logits.

    The attribute names (c, b, blk.2a.c1, fc, ...) are the tensor names in the weights file.
    """

    width = 2048

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.c, self.b = nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64, KERAS_EPSILON)
        self.fc = nn.Linear(self.width, classes)
        self.blk = nn.ModuleDict()
        inputs = 64
        for stage, (names, widths) in enumerate(STAGES, 2):
            for name in names:
                stride = 2 if name == "a" and stage > 2 else 1
                self.blk[f"{stage}{name}"] = Bottleneck(inputs, widths, stride, name == "a")
                inputs = widths[2]
        self.register_buffer("mean", torch.tensor(KERAS_MEAN).view(1, 3, 1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.flip(1) * 255 - self.mean
        x = F.max_pool2d(F.pad(F.relu(self.b(self.c(x))), (1, 1, 1, 1)), 3, 2)
        for block in self.blk.values():
            x = block(x)
        x = x.mean((2, 3))
        return x, self.fc(x)


def fold_batch_norms(net: nn.Module) -> None:
    """Fold every batch norm into the convolution before it, in fp32, so that the net can then run in bf16."""
    for module in net.modules():
        for convolution, norm in (("c", "b"), ("c1", "b1"), ("c2", "b2"), ("c3", "b3"), ("cp", "bp")):
            if isinstance(getattr(module, norm, None), nn.BatchNorm2d):
                folded = fuse_conv_bn_eval(getattr(module, convolution), getattr(module, norm))
                setattr(module, convolution, folded)
                setattr(module, norm, nn.Identity())


def load_image_teacher(path: Path, device: torch.device) -> ResNet50:
    """Frozen ResNet-50 from a safetensors file; in bf16 on a GPU."""
    tensors = {name: value.float() if value.is_floating_point() else value for name, value in load_file(path).items()}
    net = ResNet50(tensors["fc.bias"].numel())
    net.load_state_dict(tensors)
    net.eval()
    fold_batch_norms(net)
    net.requires_grad_(False).to(device)
    if device.type == "cuda":
        net.to(torch.bfloat16, memory_format=torch.channels_last)
    return net


@torch.no_grad()
def embed_strings(strings: Sequence[str], teacher: Path, device: torch.device, cache: Path | None) -> torch.Tensor:
    """Normalised mean-pooled sentence embeddings, n x width; kept in the cache folder if there is one.

    `teacher` is a folder of a BERT sentence encoder: config.json, tokenizer.json, model.safetensors.
    """
    kept = None
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        asked = json.dumps(strings).encode() + (teacher / "model.safetensors").read_bytes()
        kept = cache / f"strings-{hashlib.sha256(asked).hexdigest()[:16]}.safetensors"
        if kept.exists():
            return load_file(kept)["embeddings"].to(device)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(teacher / "tokenizer.json"), pad_token="[PAD]")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    model = BertModel(BertConfig.from_json_file(teacher / "config.json")).eval()
    tensors = load_file(teacher / "model.safetensors")
    found = model.load_state_dict({name: value.float() for name, value in tensors.items()}, strict=False)
    if missing := [name for name in found.missing_keys if "position_ids" not in name]:
        raise SystemExit(f"the sentence encoder in {teacher} lacks {', '.join(missing)}")
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    batch = 4096 if device.type == "cuda" else 256
    embeddings = torch.zeros(len(strings), model.config.hidden_size, device=device)
    by_length = np.argsort([len(string) for string in strings], kind="stable")
    for start in range(0, len(strings), batch):
        chosen = by_length[start : start + batch]
        tokens = tokenizer(
            [strings[i] for i in chosen],
            padding=True,
            truncation=True,
            max_length=MAX_STRING,
            return_tensors="pt",
        ).to(device)
        mask = tokens["attention_mask"]
        hidden = model(input_ids=tokens["input_ids"], attention_mask=mask).last_hidden_state.float()
        weight = mask.unsqueeze(-1).float()
        pooled = (hidden * weight).sum(1) / weight.sum(1)
        embeddings[torch.as_tensor(chosen.copy(), device=device)] = F.normalize(pooled, dim=1)
    if kept is not None:
        save_file({"embeddings": embeddings}, kept)
    return embeddings
