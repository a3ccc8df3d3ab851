"""Linear probe of the tiny ViLT on a set of images with text: both together against each alone, and the dual encoder.

The model card's numbers are for flipkart_image_text (product name and photo, 7 classes), 60 % of a random order for
training and the rest for the test.
"""

import argparse
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import CLIPModel, CLIPTokenizer, ViltModel

from tools.pretrain.build_text import CONTEXT
from tools.pretrain.evaluate import linear_probe
from tools.pretrain.folders import load_clip
from tools.pretrain.fused import empty_text, fuse, text_mask
from tools.pretrain.images import model_input, read_square
from tools.pretrain.sources import read_rows

BATCH = 64


@torch.inference_mode()
def features(
    vilt: ViltModel, clip: CLIPModel, images: np.ndarray, tokens: torch.Tensor, start: int, end: int
) -> dict[str, torch.Tensor]:
    """Features by name: ViLT's pooled state with both, or one missing; the dual encoder's embeddings."""
    found = defaultdict(list)
    for first in range(0, len(images), BATCH):
        pixels = model_input(images[first : first + BATCH], torch.device("cpu"))
        text = tokens[first : first + BATCH]
        empty = empty_text(text, start, end)
        found["vilt, image and text"].append(fuse(vilt, text, text_mask(text, end), pixels)[1])
        found["vilt, text only"].append(fuse(vilt, text, text_mask(text, end), torch.zeros_like(pixels))[1])
        found["vilt, image only"].append(fuse(vilt, empty, text_mask(empty, end), pixels)[1])
        image = clip.visual_projection(clip.vision_model(pixel_values=pixels).pooler_output)
        found["dual, image"].append(F.normalize(image, dim=1))
        found["dual, text"].append(
            F.normalize(clip.text_projection(clip.text_model(input_ids=text).pooler_output), dim=1)
        )
    joined = {name: torch.cat(parts) for name, parts in found.items()}
    return joined | {"dual, both": torch.cat([joined["dual, image"], joined["dual, text"]], 1)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vilt", required=True, type=Path, help="ViLT model folder")
    parser.add_argument("--clip", required=True, type=Path, help="dual encoder's model folder, centred")
    parser.add_argument("--data", required=True, type=Path, help="folder of the sets (see sources.py)")
    parser.add_argument("--set", default="flipkart_image_text", help="name of the set (default: %(default)s)")
    parser.add_argument("--text-column", default="text", help="column of the text (default: %(default)s)")
    options = parser.parse_args(arguments)

    rows = read_rows(options.data, options.set)
    random.Random(0).shuffle(rows)
    classes = sorted({row.label for row in rows})
    labels = torch.tensor([classes.index(row.label) for row in rows])
    tokenizer = CLIPTokenizer.from_pretrained(options.clip)
    texts = [row.fields[options.text_column] for row in rows]
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=CONTEXT, return_tensors="pt")
    vilt = ViltModel.from_pretrained(options.vilt, dtype=torch.float32).eval()
    clip = load_clip(options.clip)
    images = np.stack([read_square(row.source) for row in rows])
    found = features(vilt, clip, images, tokens["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token_id)
    train = int(0.6 * len(rows))
    print(f"{train} images to train on, {len(rows) - train} to test, {len(classes)} classes")
    for name, value in found.items():
        value = value.clone()  # out of inference mode
        score = linear_probe(value[:train], labels[:train], value[train:], labels[train:], len(classes))
        print(f"{name}: {score} %", flush=True)


if __name__ == "__main__":
    main()
