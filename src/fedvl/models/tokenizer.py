"""Convert text to token ids with a checkpoint's own files, of CLIP (BPE) or BERT (WordPiece)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from fedvl.errors import FedVLError

START, END = "<|startoftext|>", "<|endoftext|>"
# CLIP's split of a text into words: contractions, letters, single digits, runs of anything else.
CLIP_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt")


class TextTokenizer:
    """Tokenizer that adds a start and an end token and truncates to `length`.

    Texts are padded after the end token to the longest of a batch.
    """

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        known = {token: tokenizer.token_to_id(token) for token in (END, "[SEP]", "[PAD]")}
        end = known[END] if known[END] is not None else known["[SEP]"]
        if end is None:
            raise FedVLError(
                "The tokenizer has neither <|endoftext|> nor [SEP]: use the tokenizer.json of a CLIP or ViLT model."
            )
        self.end: int = end
        self.length = length
        self.vocabulary: int = tokenizer.get_vocab_size()
        pad = known["[PAD]"] if known["[PAD]"] is not None else end
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(pad_id=pad)
        self._tokenizer = tokenizer

    def of_length(self, length: int) -> TextTokenizer:
        """Return the same tokenizer, truncating to another length."""
        return TextTokenizer(Tokenizer.from_str(self.to_json()), length)

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return self._tokenizer.to_str()

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return n x L token ids, with L the length of the longest text."""
        return torch.tensor([encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))], dtype=torch.long)


def load_tokenizer(folder: Path, positions: int) -> TextTokenizer:
    """Load the tokenizer of a folder.

    Texts are truncated to the model's `positions`, or to fewer if the folder's settings say so.
    """
    settings = folder / "tokenizer_config.json"
    config = json.loads(settings.read_text("utf-8")) if settings.is_file() else {}
    length = min(positions, int(config.get("model_max_length") or positions))
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
    return TextTokenizer(tokenizer, length)


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
    assert number is not None  # all were added as special tokens
    return token, number
