"""Token numbers against transformers' tokenizers, from each kind of file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.lazy import lazily
from helpers.models import add_siglip_tokenizer, add_tokenizer
from tokenizers import Tokenizer

from fedvl.errors import FedVLError
from fedvl.models.checkpoint import EMBEDDED_FOLDER
from fedvl.models.tokenizer import load_siglip_tokenizer, load_tokenizer

transformers = lazily("transformers")

TEXTS = [
    "a photo of a dog",
    "Two RED cars, parked   in front of O'Hara's house!",
    "",
    "naïve café 2024 <3 \u6c34 \U0001f600",
    "it's 99% done... isn't it?",
    "word " * 60,
]


def test_clip_numbers_equal_transformers(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    reference = transformers.CLIPTokenizer.from_pretrained(tmp_path)
    expected = reference(TEXTS, padding=True, truncation=True, max_length=32, return_tensors="pt")["input_ids"]
    assert torch.equal(load_tokenizer(tmp_path, 77)(TEXTS), expected)


def test_vocabulary_and_merges_give_the_same_numbers(tmp_path: Path) -> None:
    model = json.loads((EMBEDDED_FOLDER / "tokenizer.json").read_text("utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), "utf-8")
    merges = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges, "utf-8")
    built, whole = load_tokenizer(tmp_path, 32), load_tokenizer(EMBEDDED_FOLDER, 32)
    assert torch.equal(built(TEXTS), whole(TEXTS))
    assert built.end == whole.end == 8136


def test_text_is_cut_to_the_longest_and_always_ends() -> None:
    tokenizer = load_tokenizer(EMBEDDED_FOLDER, 32)
    assert tokenizer(["a dog", "a"]).shape == (2, 4)
    numbers = tokenizer(TEXTS)
    assert numbers.shape == (len(TEXTS), 32)
    assert (numbers == tokenizer.end).any(1).all()
    assert load_tokenizer(EMBEDDED_FOLDER, 10)(TEXTS).shape[1] == 10


@pytest.mark.parametrize("lowercase", [True, False])
def test_bert_vocabulary_equals_transformers(tmp_path: Path, lowercase: bool) -> None:
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] a photo of dog two red car ##s , parked ' s house ! Two RED naive cafe"
    (tmp_path / "vocab.txt").write_text(words.replace(" ", "\n"), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase, "model_max_length": 12}))
    reference = transformers.BertTokenizer.from_pretrained(tmp_path, do_lower_case=lowercase)
    expected = reference(TEXTS, padding=True, truncation=True, max_length=12, return_tensors="pt")["input_ids"]
    assert torch.equal(load_tokenizer(tmp_path, 40)(TEXTS), expected)


def test_a_missing_or_foreign_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FedVLError, match="Hugging Face"):
        load_tokenizer(tmp_path, 77)
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(FedVLError, match="endoftext"):
        load_tokenizer(tmp_path, 77)


def test_siglip_has_words_in_lower_case_and_an_end(tmp_path: Path) -> None:
    add_siglip_tokenizer(tmp_path, "a photo of dog . ,")  # numbers 4 to 9
    second = load_siglip_tokenizer(tmp_path, 6)
    assert second(["A Photo of, DOG.", "dog"]).tolist() == [[4, 5, 6, 9, 7, 1], [7, 1, 0, 0, 0, 0]]
    settings = {"tokenizer_class": "SiglipTokenizer", "eos_token": "<eos>", "pad_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    first = load_siglip_tokenizer(tmp_path, 6)  # it was trained without punctuation, and padded with the end token
    assert first(["A Photo, of DOG.", "dog"]).tolist() == [[4, 5, 6, 7, 1], [7, 1, 1, 1, 1]]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(FedVLError, match="no end token"):
        load_siglip_tokenizer(tmp_path, 6)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FedVLError, match=r"no tokenizer\.json"):
        load_siglip_tokenizer(tmp_path, 6)
