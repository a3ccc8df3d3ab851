"""Convert text to token ids with a checkpoint's own files, of CLIP, BERT or SigLIP."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from fedvl.errors import FedVLError
from fedvl.models.numbers import real

START, END = "<|startoftext|>", "<|endoftext|>"
# CLIP's split of a text into words: contractions, letters, single digits, runs of anything else.
CLIP_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt")


class TextTokenizer:
    """Tokenizer that adds a start token (not SigLIP's) and an end token; truncates to `length`.

    Texts are padded after the end token to the longest of a batch.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, end: str, pad: str) -> None:
        self.end, self.pad = _numbered(tokenizer, end)[1], _numbered(tokenizer, pad)[1]
        self.length = length
        self.vocabulary: int = tokenizer.get_vocab_size()
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(pad_id=self.pad)
        self._tokenizer, self._names = tokenizer, (end, pad)

    def of_length(self, length: int) -> TextTokenizer:
        """Return the same tokenizer, truncating to another length."""
        return TextTokenizer(Tokenizer.from_str(self.to_json()), length, *self._names)

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return self._tokenizer.to_str()

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return n x L token ids, with L the length of the longest text."""
        return torch.tensor([encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))], dtype=torch.long)


def load_tokenizer(folder: Path, positions: int) -> TextTokenizer:
    """Load the tokenizer of a CLIP or BERT folder.

    Texts are truncated to the model's `positions`, or to fewer if the folder's settings say so.
    """
    config = _settings(folder)
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        tokenizer = _clip(folder)
    elif (folder / "vocab.txt").is_file():
        tokenizer = _bert(folder, bool(config.get("do_lower_case", True)))
    else:
        raise FedVLError(
            f"There is no tokenizer in {folder}: put tokenizer.json (or vocab.json and merges.txt) of any Hugging Face "
            "CLIP folder there."
        )
    end, pad = (_first(tokenizer, names) for names in ((END, "[SEP]"), ("[PAD]", END, "[SEP]")))
    if end is None or pad is None:
        raise FedVLError(
            "The tokenizer has neither <|endoftext|> nor [SEP]: use the tokenizer.json of a CLIP or ViLT model."
        )
    return TextTokenizer(tokenizer, _length(config, positions), end, pad)


def load_siglip_tokenizer(folder: Path, positions: int) -> TextTokenizer:
    """Load the tokenizer of a SigLIP folder: words in lower case and an end token.

    The first SigLIP was trained without punctuation, which transformers strips in code of its own.
    """
    if not (folder / "tokenizer.json").is_file():
        raise FedVLError(f"There is no tokenizer.json in {folder}: fetch the one of the model's Hugging Face folder.")
    config, tokenizer = _settings(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Gemma's vocabulary has </s> too, as a mere tag of HTML
    end = _named(config.get("eos_token")) or _first(tokenizer, ("<eos>", "</s>"))
    if end is None or tokenizer.token_to_id(end) is None:
        raise FedVLError(f"The tokenizer in {folder} has no end token: fetch the one of a SigLIP model.")
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()]
    if config.get("tokenizer_class") == "SiglipTokenizer":
        steps += [normalizers.Replace(Regex(f"[{re.escape(string.punctuation)}]"), "")]
        steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    if tokenizer.normalizer is not None:
        steps.append(tokenizer.normalizer)
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {end}", special_tokens=[_numbered(tokenizer, end)])
    return TextTokenizer(tokenizer, _length(config, positions), end, _named(config.get("pad_token")) or end)


def _settings(folder: Path) -> dict[str, Any]:
    settings = folder / "tokenizer_config.json"
    return dict(json.loads(settings.read_text("utf-8"))) if settings.is_file() else {}


def _length(config: dict[str, Any], positions: int) -> int:
    # transformers writes 1e30 where a tokenizer has no limit
    return int(min(positions, real(config.get("model_max_length") or positions, "model_max_length", 0.99, 1e31)))


def _named(token: Any) -> str | None:
    """Return a special token of a tokenizer_config.json: a text, or an object around it."""
    return token.get("content") if isinstance(token, dict) else token


def _first(tokenizer: Tokenizer, names: Sequence[str]) -> str | None:
    return next((name for name in names if tokenizer.token_to_id(name) is not None), None)


def _clip(folder: Path) -> Tokenizer:
    bpe = models.BPE.from_file(
        str(folder / "vocab.json"),
        str(folder / "merges.txt"),
        unk_token=END,
        continuing_subword_prefix="",
        end_of_word_suffix="</w>",
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.add_special_tokens([START, END])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CLIP_WORDS), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.post_processor = processors.RobertaProcessing(
        _numbered(tokenizer, END), _numbered(tokenizer, START), trim_offsets=False, add_prefix_space=False
    )
    return tokenizer


def _bert(folder: Path, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(_numbered(tokenizer, "[SEP]"), _numbered(tokenizer, "[CLS]"))
    return tokenizer


def _numbered(tokenizer: Tokenizer, token: str) -> tuple[str, int]:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise FedVLError(f"The tokenizer has no token {token}, which its settings name: fetch its files again.")
    return token, number
