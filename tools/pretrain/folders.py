"""Model folders in the layout of `transformers`: config, fp16 safetensors, tokenizer, image preprocessing."""

import json
import shutil
from pathlib import Path

import torch
from transformers import CLIPModel, PreTrainedModel

from tools.pretrain.images import IMAGE_SIZE, MEAN, STD

PREPROCESSING = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": IMAGE_SIZE},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": list(MEAN),
    "image_std": list(STD),
    "do_convert_rgb": True,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")


def save_folder(model: PreTrainedModel, tokenizer: Path, out: Path) -> None:
    """Write a model folder; `tokenizer` is any folder with the tokenizer's files. The model itself becomes fp16."""
    model.half()
    model.config.dtype = torch.float16
    model.save_pretrained(out)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, out / name)
    (out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING, indent=1))


def load_clip(folder: Path, device: torch.device | str = "cpu") -> CLIPModel:
    """A frozen fp32 dual encoder."""
    return CLIPModel.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False).to(device)
