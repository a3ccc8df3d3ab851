"""Build the tokenizer, the concept vocabulary and the text that the text tower learns from.

Reads WordNet 3.0, the label keys of build_shards.py and the Flickr8k captions. Writes to OUT:
  tokenizer/       a lower-cased byte-pair tokenizer in CLIP's layout
  text.npz         token and index arrays (see `main`)
  strings.json.gz  the strings that the sentence teacher embeds
  concepts.json    the concepts in readable form
  keys.json        the label keys, copied
No class list of a held-out set is read: a held-out class can occur only as an ordinary WordNet entry or caption word.
"""

import argparse
import gzip
import json
import random
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer

from tools.pretrain import sources
from tools.pretrain.concepts import PHYSICAL, Concept, Vocabulary
from tools.pretrain.prompts import ADJECTIVE_TEMPLATES, TEMPLATES, clean, describe, fill
from tools.pretrain.wordnet import WordNet

CONTEXT = 32
ITEM_VARIANTS = 4
CAPTIONS_PER_IMAGE = 5
START, END = "<|startoftext|>", "<|endoftext|>"


@dataclass
class Corpus:
    """Distillation items: some wordings of one text, the two teacher strings it should mean, and its synset."""

    wordings: list[list[str]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    second: list[int] = field(default_factory=list)
    synset: list[int] = field(default_factory=list)
    strings: dict[str, int] = field(default_factory=dict)
    nouns: int = 0

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def add(self, wordings: list[str], first: str, second: str, synset: int = -1) -> None:
        self.wordings.append(wordings)
        self.first.append(self.string(first))
        self.second.append(self.string(second))
        self.synset.append(synset)


def add_nouns(corpus: Corpus, wordnet: WordNet, position: dict[str, int], generator: random.Random) -> None:
    """Every common noun of up to three words, in its commonest sense."""
    for name, senses in wordnet.senses.items():
        synset = senses[0]
        shown = next((known for known in wordnet.names[synset] if known.lower() == name), name)
        proper = synset in wordnet.instances or not re.fullmatch(r"[a-z' -]+", shown)
        if proper or len(name.split()) > 3 or len(name) < 3:
            continue
        parents = wordnet.parents[synset]
        with_kind = f"{name}, a kind of {wordnet.names[parents[0]][0]}" if parents else name
        wordings = [name, fill("a photo of a {}", name, generator)]
        wordings += [fill(generator.choice(TEMPLATES), name, generator) for _ in range(2)]
        corpus.add(wordings, name, with_kind, position[synset])
    corpus.nouns = len(corpus.wordings)


def add_others(
    corpus: Corpus, wordnet: WordNet, position: dict[str, int], captions: Sequence[str], generator: random.Random
) -> None:
    """Adjectives, verbs, the glosses of physical things, and captions."""
    for word in wordnet.words("adj"):
        corpus.add([word, generator.choice(ADJECTIVE_TEMPLATES).format(word), word, word], word, word)
    for word in wordnet.words("verb"):
        corpus.add([word, f"to {word}", word, word], word, word)
    for synset, text in wordnet.gloss.items():
        if synset in wordnet.instances or PHYSICAL not in wordnet.ancestors(synset):
            continue
        gloss = clean(text)[:160]
        if len(gloss) > 8:
            named = f"{wordnet.names[synset][0].lower()}: {gloss}"
            corpus.add([gloss, gloss, named, gloss], gloss, named, position[synset])
    for caption in captions:
        corpus.add([caption] * ITEM_VARIANTS, caption, caption)


def concept_strings(corpus: Corpus, concepts: Sequence[Concept]) -> tuple[list[int], list[int]]:
    """What each concept should mean: its name, and its name with its kind."""
    names = [concept.names[0].lower() for concept in concepts]
    first = [corpus.string(name) for name in names]
    second = [
        corpus.string(f"{name}, a kind of {concept.parents[0].lower()}" if concept.parents else name)
        for name, concept in zip(names, concepts, strict=True)
    ]
    return first, second


def train_tokenizer(texts: Iterable[str], size: int) -> CLIPTokenizer:
    """A byte-pair tokenizer with CLIP's text cleaning and its order of ids.

    The ids are: 256 byte symbols, the same as word ends, the merges, start, end.
    The word ends are given to the trainer as "special tokens" only to fix their order: pairs that are equally frequent
    are merged in the order of ids, and ids that the trainer gives out itself differ from run to run.
    """
    plain = CLIPTokenizer(vocab={START: 0, END: 1}, merges=[]).backend_tokenizer
    learner = Tokenizer(models.BPE(unk_token=END, end_of_word_suffix="</w>", continuing_subword_prefix=""))
    learner.normalizer, learner.pre_tokenizer = plain.normalizer, plain.pre_tokenizer
    alphabet = sorted(ByteLevel.alphabet())
    word_ends = [symbol + "</w>" for symbol in alphabet]
    trainer = trainers.BpeTrainer(
        vocab_size=size - 2,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        special_tokens=word_ends,
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]["merges"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in learned]
    tokens = [*alphabet, *word_ends, *("".join(pair) for pair in merges), START, END]
    vocabulary = {token: position for position, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CONTEXT)


def save_tokenizer(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """All the files that readers of CLIP folders look for: tokenizer.json, and vocab.json with merges.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))


def tokenise(tokenizer: CLIPTokenizer, texts: Iterable[str]) -> np.ndarray:
    """n x 32 token ids, filled up with the end token."""
    encoded = tokenizer(list(texts), truncation=True, max_length=CONTEXT, padding="max_length", return_tensors="np")
    return encoded["input_ids"].astype(np.uint16)


def taxonomy_arrays(wordnet: WordNet, position: dict[str, int]) -> dict[str, np.ndarray]:
    """Every noun synset as the set of its ancestors, and the information content log(N / how many lie below)."""
    ancestors = [sorted(position[found] for found in wordnet.ancestors(synset)) for synset in position]
    members = np.array([found for row in ancestors for found in row], np.int32)
    below = np.bincount(members, minlength=len(position))
    return {
        "synset_content": np.log(len(position) / below).astype(np.float32),
        "synset_start": np.cumsum([0, *(len(row) for row in ancestors)]).astype(np.int32),
        "synset_ancestor": members,
    }


def label_arrays(vocabulary: Vocabulary, keys: Sequence[str], captioned: Sequence[str]) -> dict[str, np.ndarray]:
    """Labels by row: their leaf concept, the concepts true of them; label keys to label rows and caption rows."""
    labels, size = sorted(vocabulary.leaf), len(vocabulary.concepts)
    true = np.zeros((len(labels), size), bool)
    for row, key in enumerate(labels):
        true[row, vocabulary.true[key]] = True
    class_ancestor = np.zeros((len(vocabulary.imagenet), size), bool)
    for row, synset in enumerate(vocabulary.imagenet):
        class_ancestor[row, vocabulary.ancestors(synset)] = True
    label_row = {key: row for row, key in enumerate(labels)}
    caption_row = {key: row for row, key in enumerate(captioned)}
    return {
        "leaf": np.array([vocabulary.leaf[key] for key in labels], np.int32),
        "true": true,
        "class_ancestor": class_ancestor,
        "key_label": np.array([label_row.get(key, -1) for key in keys], np.int32),
        "key_caption": np.array([caption_row.get(key, -1) for key in keys], np.int32),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", required=True, type=Path, help="folder with data.noun, index.noun, index.adj, ...")
    parser.add_argument("--keys", required=True, type=Path, help="keys.json of build_shards.py")
    parser.add_argument("--flickr", required=True, help="git repository with Flicker8k_text/")
    parser.add_argument("--data", required=True, type=Path, help="holds imagenet-sample-1000, for its WordNet ids")
    parser.add_argument("--out", required=True, type=Path, help="folder to write to")
    parser.add_argument("--vocabulary", type=int, default=8137, help="tokenizer entries at most (default: %(default)s)")
    parser.add_argument("--variants", type=int, default=32, help="sentences a concept (default: %(default)s)")
    options = parser.parse_args(arguments)

    generator = random.Random(0)
    wordnet = WordNet(options.wordnet)
    keys = json.loads(options.keys.read_text())
    imagenet = sorted({row.fields["wnid"] for row in sources.read_rows(options.data, "imagenet-sample-1000")})
    vocabulary = Vocabulary(wordnet, imagenet, keys)
    concepts = vocabulary.concepts
    print(f"{len(concepts)} concepts, {len(vocabulary.leaf)} labels, not in WordNet: {vocabulary.unmatched}")
    sentences = [describe(concept, generator) for concept in concepts for _ in range(options.variants)]

    by_name = sources.flickr_captions(options.flickr)
    by_key = {key: by_name.get(key.removeprefix("flk:"), []) for key in keys if key.startswith("flk:")}
    captioned = [key for key, captions in by_key.items() if len(captions) == CAPTIONS_PER_IMAGE]
    captions = [caption for key in captioned for caption in by_key[key]]

    position = {synset: number for number, synset in enumerate(wordnet.names)}
    corpus = Corpus()
    add_nouns(corpus, wordnet, position, generator)
    add_others(corpus, wordnet, position, captions, generator)
    concept_first, concept_second = concept_strings(corpus, concepts)
    print(f"{corpus.nouns} nouns, {len(corpus.wordings)} items, {len(corpus.strings)} teacher strings")

    bare = [wordings[0] for wordings in corpus.wordings]
    tokenizer = train_tokenizer([*captions * 2, *sentences, *bare, *TEMPLATES * 200], options.vocabulary)
    save_tokenizer(tokenizer, options.out / "tokenizer")
    print(f"{len(tokenizer)} tokens")

    wordings = (wording for item in corpus.wordings for wording in item)
    np.savez_compressed(
        options.out / "text.npz",
        concept_tokens=tokenise(tokenizer, sentences).reshape(len(concepts), options.variants, CONTEXT),
        concept_first=np.array(concept_first, np.int32),
        concept_second=np.array(concept_second, np.int32),
        concept_synset=np.array([position.get(concept.synset, -1) for concept in concepts], np.int32),
        caption_tokens=tokenise(tokenizer, captions).reshape(len(captioned), CAPTIONS_PER_IMAGE, CONTEXT),
        caption_string=np.array([corpus.string(caption) for caption in captions], np.int32).reshape(len(captioned), -1),
        item_tokens=tokenise(tokenizer, wordings).reshape(-1, ITEM_VARIANTS, CONTEXT),
        item_first=np.array(corpus.first, np.int32),
        item_second=np.array(corpus.second, np.int32),
        item_synset=np.array(corpus.synset, np.int32),
        nouns=corpus.nouns,
        start=tokenizer.bos_token_id,
        end=tokenizer.eos_token_id,
        vocabulary=len(tokenizer),
        **label_arrays(vocabulary, keys, captioned),
        **taxonomy_arrays(wordnet, position),
    )
    with gzip.open(options.out / "strings.json.gz", "wt") as file:
        json.dump(list(corpus.strings), file)
    readable = [f"{concept.key} | {', '.join(concept.names)}" for concept in concepts]
    (options.out / "concepts.json").write_text(json.dumps(readable, indent=0))
    shutil.copyfile(options.keys, options.out / "keys.json")


if __name__ == "__main__":
    main()
