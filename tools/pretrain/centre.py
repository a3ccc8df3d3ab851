"""Remove what all image embeddings, and all text embeddings, have in common from a trained dual encoder.

A vision tower puts all images in a narrow cone, and texts lie in another: a direction that all share tells classes
apart by chance only. The common part, c = mean of the normalised embeddings times their mean length, is taken
from 4,000 training images and from 1,500 WordNet nouns, and subtracted by shifting the bias of the last layer norm of
each tower by pinv(P) c. That is exact (P pinv(P) = 1, since the projection P has full row rank), so that the model
stays an ordinary CLIP model. This is the last step in the making of fedvl-tiny; see its model card for what it moved.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import CLIPModel

from tools.pretrain.folders import load_clip, save_folder
from tools.pretrain.images import model_input, read_pack

BATCH = 64
PHOTO_WORDING = 1  # of an item's wordings: "a photo of a ..."


def common_part(embeddings: torch.Tensor) -> torch.Tensor:
    """Mean direction of un-normalised embeddings, with their mean length."""
    return F.normalize(embeddings, dim=1).mean(0) * embeddings.norm(dim=1).mean()


def bias_shift(projection: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """What to take from the bias before the projection, so that `part` is taken from what comes after it."""
    return (torch.linalg.pinv(projection.double()) @ part.double()).float()


@torch.inference_mode()
def image_embeddings(model: CLIPModel, images: np.ndarray) -> torch.Tensor:
    """Un-normalised."""
    device = torch.device("cpu")
    batches = (model_input(images[start : start + BATCH], device) for start in range(0, len(images), BATCH))
    return torch.cat([model.visual_projection(model.vision_model(pixel_values=x).pooler_output) for x in batches])


@torch.inference_mode()
def text_embeddings(model: CLIPModel, tokens: torch.Tensor) -> torch.Tensor:
    """Un-normalised."""
    return model.text_projection(model.text_model(input_ids=tokens).pooler_output)


def noun_tokens(text: Path, count: int) -> torch.Tensor:
    """Tokens of "a photo of a ..." for random nouns of build_text.py's folder, always the same ones."""
    content = np.load(text / "text.npz")
    chosen = torch.randint(0, int(content["nouns"]), (count,), generator=torch.Generator().manual_seed(0)).numpy()
    return torch.from_numpy(content["item_tokens"][chosen, PHOTO_WORDING].astype(np.int64))


def centre(model: CLIPModel, images: np.ndarray, tokens: torch.Tensor) -> None:
    """Remove the common parts from the model, in place."""
    image_part, text_part = common_part(image_embeddings(model, images)), common_part(text_embeddings(model, tokens))
    model.vision_model.post_layernorm.bias.data -= bias_shift(model.visual_projection.weight, image_part)
    model.text_model.final_layer_norm.bias.data -= bias_shift(model.text_projection.weight, text_part)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="model folder of train_clip.py")
    parser.add_argument("--shard", required=True, type=Path, help="first shard of build_shards.py (they are shuffled)")
    parser.add_argument("--text", required=True, type=Path, help="folder of build_text.py")
    parser.add_argument("--out", required=True, type=Path, help="model folder to write")
    parser.add_argument("--images", type=int, default=4000, help="images to average (default: %(default)s)")
    parser.add_argument("--nouns", type=int, default=1500, help="nouns to average (default: %(default)s)")
    options = parser.parse_args(arguments)
    model = load_clip(options.model)
    images, _ = read_pack(options.shard, options.images)
    centre(model, images, noun_tokens(options.text, options.nouns))
    save_folder(model, options.model, options.out)


if __name__ == "__main__":
    main()
