"""Small things that the tests of models share."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.func import grad, vmap

from fedvl.models import checkpoint

TEXTS = ["a photo of a dog", "two red cars, parked in front of the house", "deer"]


def unit(features: Tensor) -> Tensor:
    return torch.nn.functional.normalize(features, dim=-1)


def add_tokenizer(folder: Path) -> None:
    """The embedded byte-pair tokenizer: its 8,137 tokens are within any CLIP vocabulary."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint.EMBEDDED_FOLDER / file, folder / file)


def add_siglip_tokenizer(
    folder: Path, words: str = "a photo of dog two red cars parked in front the house deer . ,"
) -> None:
    """As SigLIP2's: an end token that is not the padding, and none at the start."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *words.split()])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "GemmaTokenizer", "eos_token": {"content": "<eos>"}, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def random_weights(module: torch.nn.Module, seed: int = 0, spread: float = 0.05) -> dict[str, Tensor]:
    """Random values for every weight of a module, vectors around 1 for norms: cheap, and no two tensors alike.

    To draw the 800 million numbers of a large model would take longer than all that is done with them: a million are
    drawn, and the tensors, one after the other, are filled with them again and again. No row repeats another, since
    that million is a prime number.
    """
    drawn = torch.randn(1_000_003, generator=torch.Generator().manual_seed(seed)) * spread
    weights, used = {}, 0
    for name, tensor in module.state_dict().items():
        first = used % len(drawn)
        used += tensor.numel()
        turns = -(-(first + tensor.numel()) // len(drawn))
        value = drawn.repeat(turns)[first : first + tensor.numel()].clone().reshape(tensor.shape)
        if name.endswith("running_var"):
            value = value.abs() + 0.5
        elif tensor.dim() == 1 and name.endswith("weight"):
            value = value + 1
        weights[name] = value
    return weights


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def full_copy(name: str, folder: Path) -> Path:
    """An embedded model with its weights made full, as a Hugging Face folder that transformers can open."""
    source = checkpoint.EMBEDDED_FOLDER / name
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    weights = {key: value.float() for key, value in checkpoint._read_weights(source).items()}
    write_folder(folder, config, weights)
    shutil.copyfile(source / "preprocessor_config.json", folder / "preprocessor_config.json")
    add_tokenizer(folder)
    return folder


def random_model(kind: type, config: object) -> Any:
    """One of transformers' models, whose methods PyTorch's own type does not have."""
    with torch.device("meta"):
        model = kind(config)
    model.to_empty(device="cpu")
    model.load_state_dict(random_weights(model, spread=0.02), assign=True)
    for name, buffer in model.named_buffers():
        if name.endswith("_ids"):  # position numbers, which are not saved
            buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer) if "position" in name else 0)
    return model.eval()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_batched_equals_loop(loss: Callable[[Tensor], Tensor], prompts: Tensor) -> Tensor:
    """The gradient by vmap over clients = one client after another, and vmap must not fall back to a loop itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batched = vmap(grad(loss))(prompts)
    looped = torch.stack([grad(loss)(one) for one in prompts])
    torch.testing.assert_close(batched, looped, rtol=1e-4, atol=1e-5)
    assert looped.abs().max() > 1e-3
    return looped
