"""Load a frozen encoder: an embedded model, a Hugging Face folder, an open_clip file or a hub name.

Only safetensors and JSON are read, never a pickle. Only a hub name is downloaded, and only the
files that are needed.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedvl.errors import FedVLError
from fedvl.files import MAX_JSON, file_sha256, parse_json, read_file
from fedvl.models import EMBEDDED, convert, numbers
from fedvl.models.base import FrozenEncoder
from fedvl.models.biomedclip import BertClip
from fedvl.models.clip import Clip, ClipShape, DualEncoder
from fedvl.models.preprocessing import Preprocessing, Squashing
from fedvl.models.siglip import Siglip
from fedvl.models.tokenizer import TOKENIZER_FILES, TextTokenizer, load_siglip_tokenizer, load_tokenizer
from fedvl.models.vilt import FusedEncoder
from fedvl.tensors import Tensors
from fedvl.tensors import load as read_tensors

EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
SCALE_SUFFIX = ".scale"  # an int8 tensor has one scale per row under its name with this suffix (tools/quantise.py)
CONVERTER = "SFconvertbot"  # the account of Hugging Face's own safetensors converter
OPEN_CLIP_WEIGHTS, OPEN_CLIP_CONFIG = "open_clip_model.safetensors", "open_clip_config.json"

MAX_WIDTH, MAX_TOKENS = 2**16, 2**16  # of a tower, and of a text
MODEL_TYPES = ("clip", "siglip", "vilt")  # of Hugging Face's config.json; SigLIP2 of a fixed resolution is a siglip

Encoder = TypeVar("Encoder", bound=FrozenEncoder)


def load_model(name: str, device: str = "cpu") -> DualEncoder | FusedEncoder:
    """Load the model of that name.

    name: "fedvl-tiny", "fedvl-tiny-vilt", a folder, an open_clip .safetensors file, or a hub name
    (owner/model).
    """
    path = Path(name.replace("\0", ""))
    try:
        if name in EMBEDDED:
            model: DualEncoder | FusedEncoder = _embedded(name)
        elif name and path.is_dir():
            model = _folder(path, name)
        elif path.is_file():
            model = _open_clip(path, name)
        elif is_hub_name(name):
            model = _folder(stored(name) or _download(name), name)
        else:
            raise FedVLError(
                f"There is no model {name!r}: give {', '.join(EMBEDDED)}, a folder, a .safetensors file, a hub name "
                "(owner/model), or a name under which vectors were imported (fedvl features import)."
            )
    except FedVLError:
        raise
    except Exception as error:  # files of others hold anything, and the tokenizer raises no kind of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise FedVLError(
            f"The files of the model {name} are damaged or do not fit together ({reason}): fetch it again."
        ) from error
    return model.to(device)


def is_hub_name(name: str) -> bool:
    """Whether a model of this name comes from the hub: nothing here has the name."""
    return (
        bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name))
        and not name.endswith(".safetensors")
        and not Path(name).exists()
    )


def stored(name: str) -> Path | None:
    """Return the folder of a hub model that was downloaded before; the hub is not contacted."""
    from huggingface_hub import snapshot_download

    def find(revision: str | None) -> Path | None:
        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        except Exception:  # the hub's client has no common base class
            return None

    main = find(None)
    offers = sorted((main.parents[1] / "refs" / "refs" / "pr").glob("*")) if main else []
    folders = [main, *(find(f"refs/pr/{offer.name}") for offer in offers)]
    return next((folder for folder in folders if folder and _has_weights(folder)), None)


def _has_weights(folder: Path) -> bool:
    parts = set(
        _read_json(folder / "model.safetensors.index.json").get("weight_map", {"": "model.safetensors"}).values()
    )
    return all((folder / part).is_file() for part in parts) or (folder / OPEN_CLIP_WEIGHTS).is_file()


def _embedded(name: str) -> DualEncoder | FusedEncoder:
    index = json.loads((EMBEDDED_FOLDER / "index.json").read_text("utf-8"))
    for file, sha256 in index.items():
        if file.startswith(f"{name}/") or "/" not in file:
            path = EMBEDDED_FOLDER / file
            if not path.is_file() or file_sha256(path) != sha256:
                raise FedVLError(f"The embedded file {file} is missing or damaged: install fedvl again.")
    return _hugging_face(EMBEDDED_FOLDER / name, name, EMBEDDED_FOLDER)


def _folder(folder: Path, name: str) -> DualEncoder | FusedEncoder:
    if _read_json(folder / "config.json").get("model_type") in MODEL_TYPES:
        return _hugging_face(folder, name, folder)
    if (folder / OPEN_CLIP_WEIGHTS).is_file():
        return _open_clip(folder / OPEN_CLIP_WEIGHTS, name)
    raise FedVLError(
        f"{name} is not a CLIP, SigLIP or ViLT model: it needs a config.json with model_type clip, siglip (also of SigLIP2 "
        f"with a fixed resolution) or vilt, or {OPEN_CLIP_WEIGHTS}."
    )


def _hugging_face(folder: Path, name: str, tokenizer_folder: Path) -> DualEncoder | FusedEncoder:
    config = _read_json(folder / "config.json")
    source = _read_weights(folder)
    images = _read_json(folder / "preprocessor_config.json")
    try:
        if config["model_type"] == "vilt":
            tensors = convert.vilt_from_hugging_face(source)
            vilt = convert.vilt_shape(tensors, config)
            # ViLT keeps an image's aspect ratio, unless its folder sets CLIP's centre crop.
            preprocessing = Preprocessing.from_config(images, vilt.patch * vilt.grid, crop="crop_size" in images)
            tokenizer = _fitting(load_tokenizer(tokenizer_folder, vilt.context_length), vilt.vocabulary)
            return _assemble(FusedEncoder, name, vilt, preprocessing, tokenizer, tensors)
        # Older folders store what differs from the defaults in `..._config_dict`.
        vision, text = (
            {**(config.get(f"{t}_config") or {}), **(config.get(f"{t}_config_dict") or {})} for t in ("vision", "text")
        )
        if config["model_type"] == "siglip":
            tensors = convert.siglip_from_hugging_face(source)
            siglip = convert.siglip_shape(tensors, vision, text)
            tokenizer = load_siglip_tokenizer(tokenizer_folder, siglip.context_length)
            preprocessing = Squashing.squashed(images, siglip.vision.image_size)
            _check_side(preprocessing, siglip)
            return _assemble(Siglip, name, siglip, preprocessing, _fitting(tokenizer, siglip.vocabulary), tensors)
        tensors = convert.clip_from_hugging_face(source)
        clip = convert.clip_shape(tensors, vision, text)
    except KeyError as error:
        raise FedVLError(
            f"The weights of {name} are missing {error}: the folder does not hold a complete CLIP, SigLIP or ViLT."
        ) from error
    preprocessing = Preprocessing.from_config(images, clip.vision.image_size, crop=True)
    _check_side(preprocessing, clip)
    tokenizer = _fitting(load_tokenizer(tokenizer_folder, clip.context_length), clip.vocabulary)
    return _assemble(Clip, name, clip, preprocessing, tokenizer, tensors)


def _open_clip(path: Path, name: str) -> DualEncoder:
    """Load a state dict with OpenAI's names, or BiomedCLIP's.

    Sizes come from the tensors, the rest from open_clip_config.json in the same folder.
    """
    if path.suffix != ".safetensors":
        raise FedVLError(
            f"{name} is not a .safetensors file: convert it (safetensors.torch.save_file), FedVL reads no pickles."
        )
    config = _read_json(path.parent / OPEN_CLIP_CONFIG)
    text_tower = config.get("model_cfg", {}).get("text_cfg", {})
    bert = "hf_model_name" in text_tower
    if bert and text_tower.get("hf_pooler_type") != "cls_last_hidden_state_pooler":
        raise FedVLError(f"{name} has a text tower that FedVL does not support: use a CLIP, or BiomedCLIP.")
    try:
        source = _dequantised(read_tensors(path))
        if bert:
            length = numbers.whole(text_tower.get("context_length", 77), "context_length", MAX_TOKENS)
            tensors = convert.bert_clip_from_open_clip(source, length)
            shape: ClipShape = convert.bert_clip_shape(tensors)
        else:
            tensors = convert.clip_from_open_clip(source)
            shape = convert.clip_shape(tensors, *_open_clip_settings(config, path))
    except KeyError as error:
        raise FedVLError(
            f"{name} is missing the tensor {error}: it is not a CLIP model in open_clip's format."
        ) from error
    images = config.get("preprocess_cfg", {})
    if images.get("resize_mode", "shortest") != "shortest" or images.get("interpolation", "bicubic") != "bicubic":
        raise FedVLError(
            f"{name} needs images resized in a way that FedVL does not support: use a model with CLIP's preprocessing."
        )
    renamed = {f"image_{key}": images[key] for key in ("mean", "std") if key in images}
    preprocessing = Preprocessing.from_config(renamed, shape.vision.image_size, crop=True)
    tokenizer = _fitting(load_tokenizer(path.parent, shape.context_length), shape.vocabulary)
    return _assemble(BertClip if bert else Clip, name, shape, preprocessing, tokenizer, tensors)


def _open_clip_settings(config: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return heads and activation of the image and text towers under Hugging Face's names."""
    model = config.get("model_cfg")
    if model is None:
        warnings.warn(
            f"There is no {OPEN_CLIP_CONFIG} next to {path.name}: OpenAI's activation (quick_gelu) is assumed.",
            stacklevel=4,
        )
        return {}, {}
    activation = {"hidden_act": "quick_gelu" if model.get("quick_gelu") else "gelu"}
    vision, text = dict[str, Any](activation), dict[str, Any](activation)
    image_tower, text_tower = model.get("vision_cfg", {}), model.get("text_cfg", {})
    if isinstance(image_tower.get("layers"), int):
        width = numbers.whole(image_tower["width"], "vision_cfg.width", MAX_WIDTH)
        vision["num_attention_heads"] = width // numbers.whole(
            image_tower.get("head_width", 64), "vision_cfg.head_width", width
        )
    if "heads" in text_tower:
        text["num_attention_heads"] = text_tower["heads"]
    return vision, text


def _assemble(
    kind: type[Encoder], name: str, shape: Any, preprocessing: Preprocessing, tokenizer: TextTokenizer, tensors: Tensors
) -> Encoder:
    with torch.device("meta"):
        model = kind(name, shape, preprocessing, tokenizer)
    try:
        model.load_state_dict({key: value.float().contiguous() for key, value in tensors.items()}, assign=True)
    except RuntimeError as error:
        raise FedVLError(f"The weights of {name} do not fit together: {' '.join(str(error).split())}") from error
    return model.requires_grad_(False).eval()


def _check_side(preprocessing: Preprocessing, shape: ClipShape) -> None:
    """Refuse images of another size than the image tower has positions for."""
    if preprocessing.crop != shape.vision.image_size:
        key = "size" if isinstance(preprocessing, Squashing) else "crop_size"
        raise numbers.refused_number(key, preprocessing.crop, f"{shape.vision.image_size}, as its weights are")


def _fitting(tokenizer: TextTokenizer, vocabulary: int) -> TextTokenizer:
    if tokenizer.vocabulary > vocabulary:
        raise FedVLError(
            f"The tokenizer beside the model has {tokenizer.vocabulary} tokens but the model {vocabulary}: it belongs to "
            "another model, put the right one there."
        )
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = parse_json(read_file(path, MAX_JSON))
    except ValueError as error:
        raise FedVLError(f"{path} is not valid JSON ({error}): fetch it again.") from error
    if not isinstance(content, dict):
        raise FedVLError(f"{path} does not hold a JSON object: fetch it again.")
    return content


def _read_weights(folder: Path) -> Tensors:
    index = _read_json(folder / "model.safetensors.index.json")
    parts = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
    if missing := [part for part in parts if not (folder / part).is_file()]:
        pickled = ", only pickled weights, which FedVL does not open" if any(folder.glob("*.bin")) else ""
        raise FedVLError(
            f"{folder} has no {missing[0]}{pickled}: convert the weights to safetensors (transformers' save_pretrained "
            "does), or use a model that has them."
        )
    tensors: Tensors = {}
    for part in parts:
        tensors.update(read_tensors(folder / Path(part).name))
    return _dequantised(tensors)


def _dequantised(tensors: Tensors) -> Tensors:
    """Return the tensors with 8-bit rows as floats: value = integer * scale of its row.

    Tensors of other kinds are unchanged.
    """
    full = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE_SUFFIX)}
    for name, tensor in full.items():
        if tensor.dtype == torch.int8:
            full[name] = tensor.float() * tensors[name + SCALE_SUFFIX].view(-1, *[1] * (tensor.dim() - 1))
    return full


def _download(name: str) -> Path:
    """Download the small files of a hub model, then its weights, into the hub's cache."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download

    small = ["config.json", "preprocessor_config.json", OPEN_CLIP_CONFIG, *TOKENIZER_FILES]
    try:
        folder = Path(snapshot_download(name, allow_patterns=small))
        if _read_json(folder / "config.json").get("model_type") not in MODEL_TYPES:
            return Path(snapshot_download(name, allow_patterns=[OPEN_CLIP_WEIGHTS]))
        weights = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
        folder = Path(snapshot_download(name, allow_patterns=weights))
        if not any(folder.glob("model*.safetensors")) and (revision := _converted(name, folder)):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*small, *weights]))
        return folder
    except FedVLError:
        raise
    except Exception as error:  # the hub's client and its transport have no common base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FedVLError(
            f"Cannot fetch the model {name!r} ({reason}): check the name and the network, or give a folder that has it."
        ) from error


def _converted(name: str, folder: Path) -> str | None:
    """Return the pull request with safetensors of a model that is published as a pickle only.

    The hub's own converter opens such pull requests.
    """
    from huggingface_hub import HfApi

    try:
        offers = HfApi().get_repo_discussions(name, author=CONVERTER, discussion_type="pull_request")
        numbers = [str(offer.num) for offer in offers if "safetensors" in offer.title]
    except Exception:  # no network: use the one downloaded before
        numbers = [path.name for path in (folder.parents[1] / "refs" / "refs" / "pr").glob("*")]
    return f"refs/pr/{numbers[0]}" if numbers else None
