"""Store a model at 8 bits, or compare a stored one with its original.

    python tools/quantise.py FOLDER NAME            # writes src/fedvl/models/embedded/NAME
    python tools/quantise.py FOLDER NAME --compare  # on the 3,000 images of cifar10-mini

FOLDER is a Hugging Face folder with 16- or 32-bit weights. Matrices become int8 with one 32-bit
scale per row; vectors and a few sensitive matrices are unchanged. Run it for each embedded model;
it updates the index of SHA-256 hashes.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import torch

from fedvl.data.sources import open_dataset
from fedvl.files import file_sha256
from fedvl.models.checkpoint import EMBEDDED_FOLDER, SCALE_SUFFIX, load_model
from fedvl.models.clip import DualEncoder
from fedvl.models.vilt import FusedEncoder
from fedvl.tensors import Tensors, load, save

# The most sensitive matrices of the text tower stay at 16 bits, for 0.25 MB more: the lowest cosine of 1,000 words to
# the original is then 0.9992, not 0.9986.
KEPT = re.compile(r".*position_embeddings?(\.weight)?|text_model\.encoder\.layers\.0\.self_attn\.[qkv]_proj\.weight")


def quantise(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 of the same shape, and one scale per row that makes its largest value 127."""
    rows = tensor.float().flatten(1)
    scales = rows.abs().amax(1).clamp(min=1e-12) / 127
    return (rows / scales[:, None]).round().to(torch.int8).view_as(tensor), scales


def shrink(tensors: Tensors) -> Tensors:
    small: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or KEPT.fullmatch(name):
            small[name] = tensor
        else:
            small[name], small[name + SCALE_SUFFIX] = quantise(tensor)
    return small


def embed(folder: Path, name: str) -> None:
    target = EMBEDDED_FOLDER / name
    target.mkdir(parents=True, exist_ok=True)
    save(target / "model.safetensors", shrink(load(folder / "model.safetensors")))
    for file in ("config.json", "preprocessor_config.json"):
        shutil.copyfile(folder / file, target / file)
    # The embedded models share one tokenizer, written without spaces to halve its size.
    for file in ("tokenizer.json", "tokenizer_config.json"):
        content = json.loads((folder / file).read_text("utf-8"))
        compact = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        shared = EMBEDDED_FOLDER / file
        if shared.is_file() and shared.read_text("utf-8") != compact:
            raise SystemExit(f"{folder / file} differs from the tokenizer that the other embedded models use.")
        shared.write_text(compact, "utf-8")
    files = sorted(path for path in EMBEDDED_FOLDER.rglob("*") if path.suffix in (".json", ".safetensors"))
    index = {
        path.relative_to(EMBEDDED_FOLDER).as_posix(): file_sha256(path) for path in files if path.name != "index.json"
    }
    (EMBEDDED_FOLDER / "index.json").write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    print(f"{target}: {sum(path.stat().st_size for path in target.iterdir()) / 1e6:.1f} MB")


@torch.inference_mode()
def compare(folder: Path, name: str) -> None:
    dataset = open_dataset("cifar10-mini")
    splits = dataset.splits.values()
    images = [split.read(index) for split in splits for index in range(len(split))]
    labels = torch.cat([torch.from_numpy(split.labels) for split in splits])
    prompts = [f"a photo of a {class_name}" for class_name in dataset.class_names]
    vocabulary = json.loads((EMBEDDED_FOLDER / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    whole_words = [entry.removesuffix("</w>") for entry in vocabulary if entry.endswith("</w>")]
    words = [f"a photo of a {word}" for word in whole_words if word.isalpha()][:1000]
    features: dict[str, list[torch.Tensor]] = {}
    for model in (load_model(str(folder)), load_model(name)):
        batches = []
        for start in range(0, len(images), 64):
            pixels = model.normalise(torch.stack([model.preprocess(image) for image in images[start : start + 64]]))
            if isinstance(model, FusedEncoder):
                texts = [prompts[label] for label in labels[start : start + 64].tolist()]
                batches.append(model.encode(model.tokenise(texts), pixels)[1])
            else:
                batches.append(model.encode_image(pixels))
        found = torch.nn.functional.normalize(torch.cat(batches), dim=1)
        features.setdefault("pooled states" if isinstance(model, FusedEncoder) else "images", []).append(found)
        if isinstance(model, DualEncoder):
            features.setdefault("words", []).append(model.encode_text(model.tokenise(words)))
            classes = torch.nn.functional.normalize(model.encode_text(model.tokenise(prompts)), dim=1)
            right = (found @ classes.T).argmax(1) == labels
            print(f"{model.name}: zero-shot {100 * right.double().mean():.2f} % of {len(right)} images")
    for what, (original, stored) in features.items():
        cosine = torch.cosine_similarity(original, stored, dim=1)
        print(f"cosine of {len(cosine)} {what}: mean {cosine.mean():.5f}, least {cosine.min():.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="Hugging Face folder: config.json, model.safetensors, tokenizer.json, ..."
    )
    parser.add_argument("name", help="name under which the model is embedded")
    parser.add_argument(
        "--compare", action="store_true", help="write nothing; measure the embedded model against FOLDER"
    )
    arguments = parser.parse_args()
    (compare if arguments.compare else embed)(arguments.folder, arguments.name)


if __name__ == "__main__":
    main()
