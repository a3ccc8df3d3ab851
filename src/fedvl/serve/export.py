"""Export a run's model for use without FedVL: a Hugging Face CLIP, and a classifier on it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.predict import Conversation
from fedvl.files import write_whole
from fedvl.methods.parts.adapters import gated
from fedvl.models import EMBEDDED
from fedvl.models.clip import Clip, ClipShape, DualEncoder, ViTShape
from fedvl.models.convert import clip_to_hugging_face
from fedvl.models.tokenizer import END, START
from fedvl.models.transformer import StackShape
from fedvl.report.card import Accuracy, card_text, lineage
from fedvl.runs.evaluation import without_validation
from fedvl.runs.preparation import SPLITS, prepare
from fedvl.serve.model import TrainedModel
from fedvl.tensors import Tensors, save

PROBES = 64  # random images on which the exported formula must agree with the method
GATE_CODE = """
    gate = torch.tanh(z @ head["gate.0.weight"].T + head["gate.0.bias"])
    z = z * torch.softmax(gate @ head["gate.1.weight"].T + head["gate.1.bias"], dim=-1)"""
README = """---
library_name: transformers
pipeline_tag: image-classification
license: {licence}
---

# {title}

Made by `fedvl export` from a run of {method} on {dataset}. It predicts {count} classes, which `classes.json` lists.
`config.json`, `model.safetensors`, the tokenizer and `preprocessor_config.json` are a Hugging Face CLIP: the frozen encoder.
`classifier.safetensors` is what was learned; `MODEL_CARD.md` says from what, by whom and how well;
`image.py` opens images as FedVL does.

This gives the scores of the classes for an image:

```python
import json, torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, CLIPModel
from image import open_rgb
model, read = CLIPModel.from_pretrained("."), AutoImageProcessor.from_pretrained(".")
head, names = load_file("classifier.safetensors"), json.load(open("classes.json"))
with torch.no_grad():
    pixels = read(open_rgb("photo.jpg"), return_tensors="pt")["pixel_values"]
    z = model.visual_projection(model.vision_model(pixels).pooler_output){gate}
    scores = torch.nn.functional.normalize(z, dim=-1) @ head["weight"].T + head["bias"]
print(names[int(scores.argmax())])
```
{memory}"""
IMAGE = '''"""Open an image as FedVL does: turned upright, 16 bits scaled to 8, transparency laid over white."""

import numpy as np
from PIL import Image, ImageOps


def open_rgb(path):
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray(np.round(np.asarray(image).astype(np.int64) / 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")
'''
THRESHOLDS = """
`thresholds.json` has the share of each class (the softmax of the scores{divided}) from which an image counts as of it, {chosen}.
"""
MEMORY = """
The run keeps images with confident predictions as examples for later ones; this folder does not, and scores each image by
its class texts alone.
"""


def export(run: TrainedModel, folder: Path, names: Sequence[str] | None = None, client: int | None = None) -> None:
    """Write the folder; refuse a method whose scores need more than the image embedding."""
    user = run.user(names, client=client)
    head = classifier(run, user.conversation)
    config = hugging_face_config(run.encoder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedVLError(f"{folder} exists already; choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        "model.safetensors": clip_to_hugging_face(dict(run.encoder.state_dict())),
        "classifier.safetensors": head,
    }
    hashes = {name: save(folder / name, tensors, {"format": "pt"}) for name, tensors in weights.items()}
    readme = README.format(
        title=folder.name,
        licence="apache-2.0" if run.experiment.model.name in EMBEDDED else "other",
        method=run.name,
        dataset=run.experiment.data.dataset,
        count=len(user.names),
        gate=GATE_CODE if "gate.0.weight" in head else "",
        memory=MEMORY if user.remembers else "",
    )
    card = lineage(run.folder, user.names, client, hashes, measure(run, head, user.names, client))
    texts = {
        "config.json": json.dumps(config, indent=1),
        "preprocessor_config.json": json.dumps(preprocessor_config(run.encoder), indent=1),
        "tokenizer.json": run.encoder.tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(tokenizer_config(run.encoder), indent=1),
        "classes.json": json.dumps(list(user.names), ensure_ascii=False, indent=1),
        "image.py": IMAGE,
        "README.md": readme,
        "MODEL_CARD.md": card_text(folder.name, card),
        "model_card.json": json.dumps(asdict(card), ensure_ascii=False, indent=1),
    }
    if user.thresholds is not None and run.thresholds is not None:
        texts["thresholds.json"] = run.thresholds.model_dump_json(indent=1)
        texts["README.md"] += THRESHOLDS.format(
            chosen=run.thresholds.chosen, divided=f" divided by {user.temperature:g}" if run.temperature else ""
        )
    for name, text in texts.items():
        write_whole(folder / name, text.encode())


def classifier(run: TrainedModel, conversation: Conversation) -> Tensors:
    """Return weight and bias on unit embeddings, and a gate if any, that score as the method."""
    method, tensors = conversation.method, conversation.tensors
    width = run.encoder.dim
    with torch.no_grad():
        probes = torch.randn(PROBES, width, generator=torch.Generator().manual_seed(0)).to(run.device)
        inputs = {"embeddings": probes, "features": normalize(probes, dim=-1)}
        if not {*run.forms} <= inputs.keys():
            raise FedVLError(
                f"Method '{run.name}' reads more of an image than its CLIP embedding, so it cannot be exported."
            )
        if "gate.0.weight" in tensors:
            texts = method.task.text_features
            head = {**tensors, "weight": run.encoder.logit_scale * texts, "bias": texts.new_zeros(len(texts))}
        else:
            axes = torch.cat([torch.eye(width), torch.zeros(1, width)]).to(run.device)
            *slopes, bias = method.predict(tensors, {"embeddings": axes, "features": axes})
            head = {"weight": (torch.stack(slopes) - bias).T.contiguous(), "bias": bias}
        wanted = method.predict(tensors, inputs)
        if not torch.allclose(scores(head, probes), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
            raise FedVLError(
                f"The scores of method '{run.name}' are not a linear function of image features; it cannot be exported."
            )
    return head


def measure(run: TrainedModel, head: Tensors, names: Sequence[str], client: int | None) -> Accuracy | None:
    """Return the accuracy of what is exported, on the run's own test images.

    None if they are not on this machine. A client's model is tested on that client's images.
    """
    if list(names) != run.class_names or run.result.party:
        return None
    splits = ("test",) if client is None else SPLITS
    try:
        prepared = prepare(without_validation(run.folder.experiment), Silent(), splits=splits)
    except (FedVLError, OSError):
        return None
    task, samples = prepared.queried.task, prepared.test.samples
    if list(task.class_names) != run.class_names:
        return None
    samples = samples.take(torch.nonzero(samples.labels >= 0).flatten())
    if client is not None:
        samples = prepared.test.samples.take(prepared.test.parts[client])
    if not len(samples):
        return None
    inputs = {form: tensor.to(run.device) for form, tensor in samples.inputs.items()}
    labels = samples.labels.to(run.device)
    answers = scores(head, inputs.get("embeddings", inputs["features"])).argmax(-1)
    zero_shot = (inputs["features"] @ task.text_features.to(run.device).T).argmax(-1)
    right, before = int((answers == labels).sum()), int((zero_shot == labels).sum())
    of = "" if client is None else f" of client {client}"
    return Accuracy.counted(run.result.protocol, len(labels), right, before, of)


def scores(head: Tensors, embeddings: Tensor) -> Tensor:
    """Score embeddings by the formula of the exported folder's README."""
    if "gate.0.weight" in head:
        embeddings = gated(head, embeddings)
    return normalize(embeddings, dim=-1) @ head["weight"].T + head["bias"]


def hugging_face_config(encoder: DualEncoder) -> dict[str, JsonValue]:
    shape = encoder.shape
    if not isinstance(encoder, Clip) or not isinstance(shape, ClipShape) or not isinstance(shape.vision, ViTShape):
        raise FedVLError(
            f"{encoder.name} is not a CLIP with a ViT as image tower, and only such a model can be exported; use one."
        )
    start, end = (int(number) for number in encoder.tokenise([""])[0])
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "dtype": "float32",
        "projection_dim": shape.dim,
        "text_config": {
            **stack_config(shape.text),
            "model_type": "clip_text_model",
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": shape.context_length,
            "projection_dim": shape.dim,
            "bos_token_id": start,
            "eos_token_id": end,
            "pad_token_id": end,
        },
        "vision_config": {
            **stack_config(shape.vision.stack),
            "model_type": "clip_vision_model",
            "image_size": shape.vision.image_size,
            "patch_size": shape.vision.patch,
            "projection_dim": shape.dim,
        },
    }


def stack_config(stack: StackShape) -> dict[str, JsonValue]:
    return {
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "intermediate_size": stack.hidden,
        "hidden_act": stack.activation,
        "layer_norm_eps": stack.epsilon,
    }


def preprocessor_config(encoder: DualEncoder) -> dict[str, JsonValue]:
    images = encoder.preprocessing
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": images.shorter},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": images.crop, "width": images.crop},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(images.mean),
        "image_std": list(images.std),
        "do_convert_rgb": True,
    }


def tokenizer_config(encoder: DualEncoder) -> dict[str, JsonValue]:
    return {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": encoder.tokenizer.length,
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
    }
