"""The pretraining tool's reading of sources, its text, its views and its teachers, on made-up data."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.lazy import lazily
from PIL import Image
from safetensors.torch import load_file

transformers = lazily("transformers")
augment = lazily("tools.pretrain.augment")
build_shards = lazily("tools.pretrain.build_shards")
build_text = lazily("tools.pretrain.build_text")
concepts = lazily("tools.pretrain.concepts")
images = lazily("tools.pretrain.images")
losses = lazily("tools.pretrain.losses")
prompts = lazily("tools.pretrain.prompts")
rehearsal = lazily("tools.pretrain.rehearsal")
sources = lazily("tools.pretrain.sources")
teachers = lazily("tools.pretrain.teachers")
training_set = lazily("tools.pretrain.training_set")
wordnet = lazily("tools.pretrain.wordnet")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources, shards and text."""
    root = tmp_path_factory.mktemp("world")
    rehearsal.main(["--out", str(root)])
    both = ["--flickr", str(root / "flickr"), "--data", str(root / "data")]
    shards = ["--tiny-imagenet", str(root / "tiny"), "--fruits", str(root / "fruits"), "--out", str(root / "shards")]
    build_shards.main([*both, *shards, "--shards", "2", "--workers", "1"])
    text = ["--wordnet", str(root / "wordnet"), "--keys", str(root / "shards/keys.json"), "--out", str(root / "text")]
    build_text.main([*both, *text, "--vocabulary", "1000", "--variants", "3"])
    return root


# ---------------------------------------------------------------------------------------------------- sources, shards
def test_wordnet_is_read(world: Path) -> None:
    net = wordnet.WordNet(world / "wordnet")
    assert net.names[concepts.CAR] == ["car", "automobile"]
    assert net.gloss[concepts.ANIMAL] == "a living organism that moves"
    assert net.ancestors("n60000001") == {
        "n60000001",
        concepts.BIRD,
        concepts.ANIMAL,
        concepts.PHYSICAL,
        "n00001740",
    }
    assert net.instances == {"n70000001"}
    assert net.find("Bird", [concepts.ANIMAL]) == concepts.BIRD  # not its commonest sense
    assert net.find("bird", [concepts.PLANT]) is None
    assert net.words("adj") == ["red"]
    assert net.words("verb") == ["run"]


def test_git_contents_come_in_order_and_skip_the_missing(world: Path) -> None:
    repository = str(world / "flickr")
    files = [(identity, path) for identity, path in sources.git_files(repository, "Flicker8k_text")]
    asked = [files[0], ("0" * 40, "missing"), files[1]]
    expected = [(path, (world / "flickr" / path).read_bytes()) for _, path in files]
    assert list(sources.git_contents(repository, asked)) == expected


def test_sets_are_read_from_parquet_too(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    content = {"image": [b"a", b"b"], "label": ["x", "y"], "split": ["train", "test"], "text": ["one", "two"]}
    parquet.write_table(pyarrow.table(content), tmp_path / "some.parquet")
    rows = sources.read_rows(tmp_path, "some")
    assert [(row.source, row.label, row.split) for row in rows] == [(b"a", "x", "train"), (b"b", "y", "test")]
    assert rows[1].fields["text"] == "two"
    with pytest.raises(SystemExit, match="no set other"):
        sources.read_rows(tmp_path, "other")


def test_square_crop() -> None:
    stripes = np.zeros((64, 96, 3), np.uint8)
    stripes[:, 16:80] = 255  # the centre of a picture that is already 64 high
    assert images.read_square(stripes).min() == 255
    assert images.fit_square(Image.new("RGB", (100, 333))).size == (64, 64)


def test_shards_hold_back_what_they_must(world: Path) -> None:
    keys = json.loads((world / "shards/keys.json").read_text())
    pixels, labels = images.load_shards(world / "shards", None)
    count = {key: int((labels == number).sum()) for number, key in enumerate(keys)}
    ids = rehearsal.class_ids(8)
    expected = {f"wn:{synset}": 8 if synset in ids[:4] else 1 for synset in ids}
    expected |= {f"flk:{number}.jpg": 1 for number in range(6)}  # 6 to 9 are the test list
    expected |= {"fru:Apple Golden 1": 25, "cub:Yellow_Warbler": 2}
    expected |= {f"car:Made-Up X{number} Sedan 2012": 1 for number in range(2)}
    # Rows 0, 5, 10 of Caltech-101 are held back: one background, one leopard, one chair.
    expected |= {"none": 1, "cal:Leopards": 6, "cal:windsor_chair": 5}
    assert count == expected
    source = np.asarray(Image.open(world / f"tiny/tiny-imagenet-200/train/{ids[0]}/images/{ids[0]}_0.JPEG"))
    same = pixels[labels == keys.index(f"wn:{ids[0]}")].astype(int)
    assert np.abs(same - source).mean((1, 2, 3)).min() < 8  # WebP at quality 75


def test_unreadable_image_is_skipped() -> None:
    assert build_shards.pack_image(("key", b"not an image")) == ("key", None)


def test_cached_images_follow_the_shards(world: Path, tmp_path: Path) -> None:
    first = images.load_shards(world / "shards", tmp_path)
    again = images.load_shards(world / "shards", tmp_path)
    np.testing.assert_array_equal(first[0], again[0])
    other = tmp_path / "other"
    images.write_pack(other / "shard0", [images.encode_webp(Image.new("RGB", (64, 64)), 75, 4)], [3])
    assert images.load_shards(other, tmp_path)[1].tolist() == [3]
    with pytest.raises(SystemExit, match="no shards"):
        images.load_shards(tmp_path / "nowhere", None)


# ---------------------------------------------------------------------------------------------------- text
def test_labels_become_concepts(world: Path) -> None:
    net = wordnet.WordNet(world / "wordnet")
    keys = ["cal:Leopards", "cal:windsor_chair", "cub:Yellow_Warbler", "car:Made-Up X1 Sedan 2012"]
    keys += ["fru:Apple Golden 1", "cal:dollar_bill", "none", "flk:1.jpg"]
    vocabulary = concepts.Vocabulary(net, rehearsal.class_ids(8), keys)

    def true(key: str) -> set[str]:
        return {vocabulary.concepts[number].key for number in vocabulary.true[key]}

    def leaf(key: str) -> Any:
        return vocabulary.concepts[vocabulary.leaf[key]]

    assert [concept.key for concept in vocabulary.concepts[:8]] == rehearsal.class_ids(8)
    # "entity" and "physical entity" are left out, being above "animal" and "food".
    assert true("cal:Leopards") == {"n60000004", concepts.ANIMAL}
    assert true("cal:windsor_chair") == {"cal:windsor chair", "n60000005", concepts.ARTEFACT}
    assert leaf("cub:Yellow_Warbler").names == ["yellow warbler"]
    assert true("cub:Yellow_Warbler") == {"cub:yellow warbler", "n60000001", concepts.BIRD, concepts.ANIMAL}
    assert leaf("car:Made-Up X1 Sedan 2012").key == "car:made-up x1 sedan"
    assert {"n60000002", concepts.CAR} <= true("car:Made-Up X1 Sedan 2012")
    assert leaf("fru:Apple Golden 1").names == ["golden apple", "apple"]
    assert {"n60000003", concepts.EDIBLE_FRUIT, concepts.FOOD} <= true("fru:Apple Golden 1")
    assert true("cal:dollar_bill") == {"cal:dollar bill"}
    assert vocabulary.unmatched == ["cal:dollar_bill"]
    assert set(vocabulary.leaf) == set(keys[:6])


def test_article_is_mostly_fixed() -> None:
    generator = random.Random(0)
    filled = [prompts.fill("a photo of a {}", "owl", generator) for _ in range(1000)]
    assert set(filled) == {"a photo of a owl", "a photo of an owl"}
    assert 350 < filled.count("a photo of an owl") < 450
    assert prompts.fill("a photo of a {}", "dog", generator) == "a photo of a dog"


def test_tokenizer_has_the_layout_of_clip(world: Path) -> None:
    folder = world / "text/tokenizer"
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
    vocabulary = json.loads((folder / "vocab.json").read_text())
    merges = [line.split(" ") for line in (folder / "merges.txt").read_text().splitlines()[1:]]
    assert list(vocabulary.values()) == list(range(len(vocabulary)))
    assert list(vocabulary)[-2:] == ["<|startoftext|>", "<|endoftext|>"]
    assert [vocabulary[name] for name in list(vocabulary)[:256]] == list(range(256))
    assert all(left in vocabulary and right in vocabulary and left + right in vocabulary for left, right in merges)
    assert len(merges) + 512 + 2 == len(vocabulary)
    ids = tokenizer("A Photo of a DOG")["input_ids"]
    assert ids[0] == len(vocabulary) - 2
    assert ids[-1] == len(vocabulary) - 1
    assert tokenizer.convert_ids_to_tokens(ids[1:3]) == ["a</w>", "photo</w>"]


def test_tokenizer_training_is_repeatable() -> None:
    generator = random.Random(0)  # random words: many pairs are equally frequent
    texts = ["".join(generator.choices("abcdefghijklmnop", k=5)) for _ in range(400)]
    tokenizers = [build_text.train_tokenizer(texts, 700) for _ in range(3)]
    assert [len(tokenizer) for tokenizer in tokenizers] == [700] * 3
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab() == tokenizers[2].get_vocab()


def test_text_arrays_agree_with_each_other(world: Path) -> None:
    content = np.load(world / "text/text.npz")
    keys = json.loads((world / "text/keys.json").read_text())
    names = json.loads((world / "text/concepts.json").read_text())
    tokenizer = transformers.CLIPTokenizer.from_pretrained(world / "text/tokenizer")
    row = content["key_label"][keys.index("cal:Leopards")]
    assert names[content["leaf"][row]] == "n60000004 | leopard"
    assert {names[i].split(" |")[0] for i in np.flatnonzero(content["true"][row])} == {"n60000004", concepts.ANIMAL}
    caption = content["caption_tokens"][content["key_caption"][keys.index("flk:3.jpg")], 1]
    assert tokenizer.decode(caption, skip_special_tokens=True) == "a dog number 3 runs very fast"
    nouns = int(content["nouns"])
    bare = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in content["item_tokens"][:, 0]]
    assert "leopard" in bare[:nouns]
    assert "paris" not in bare  # a proper name
    assert {"red", "run", "a large spotted feline", "a dog number 0 runs fast"} <= set(bare[nouns:])
    # Information content: log of all synsets over those at or below; the entity is above everything.
    total = len(content["synset_content"])
    assert content["synset_content"][0] == 0
    below_bird = 4  # itself, the warbler and two made-up classes
    assert content["synset_content"][8] == pytest.approx(math.log(total / below_bird))
    begin, end = content["synset_start"][10:12]  # the warbler: itself, bird, animal, physical entity, entity
    assert content["synset_ancestor"][begin:end].tolist() == [0, 1, 2, 8, 10]


def test_taxonomy_brings_kin_together(world: Path) -> None:
    arrays = training_set.Arrays(world / "text", CPU)
    vectors = training_set.taxonomy_vectors(
        arrays.tensor("synset_start"), arrays.tensor("synset_ancestor"), arrays.tensor("synset_content", torch.float32)
    )
    assert vectors[-1].abs().sum() == 0
    bird, warbler, sedan = vectors[8], vectors[10], vectors[11]
    assert bird @ warbler > bird @ sedan + 0.3


# ---------------------------------------------------------------------------------------------------- views, teachers
def test_mixing_weights_are_the_parts_of_the_pixels() -> None:
    torch.manual_seed(0)
    level = torch.rand(64)
    x = level.view(-1, 1, 1, 1).expand(64, 3, 16, 16)
    mixed, partner, own = augment.mix(x, 0.5)
    torch.testing.assert_close(mixed.mean((1, 2, 3)), own * level + (1 - own) * level[partner])
    assert 16 <= (own > losses.PURE).sum() <= 48
    untouched, _, own = augment.mix(x, 0.0)
    assert torch.equal(untouched, x)
    assert own.min() == 1


def test_views_keep_to_range_and_vary() -> None:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8).expand(32, -1, -1, -1)
    views = augment.augment(pixels)
    assert views.shape == (32, 3, 64, 64)
    assert views.min() >= 0
    assert views.max() <= 1
    assert views.std(0).mean() > 0.05


def test_folding_batch_norms_changes_nothing(world: Path) -> None:
    torch.manual_seed(0)
    block = teachers.Bottleneck(8, (4, 4, 16), 2, True).eval()
    for module in block.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            mean, variance = module.running_mean, module.running_var
            assert mean is not None
            assert variance is not None
            mean.uniform_(-1, 1)
            variance.uniform_(0.5, 2)
    x = torch.randn(2, 8, 6, 6)
    before = block(x)
    teachers.fold_batch_norms(block)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in block.modules())
    torch.testing.assert_close(block(x), before, atol=1e-5, rtol=1e-5)


def test_sentence_embeddings_are_masked_means(world: Path, tmp_path: Path) -> None:
    strings, folder = ["a photo of a large bird", "bird"], world / "sentences"
    found = teachers.embed_strings(strings, folder, CPU, tmp_path)
    model = transformers.BertModel(transformers.BertConfig.from_json_file(folder / "config.json")).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for string, embedding in zip(strings, found, strict=True):
        with torch.no_grad():
            alone = model(**tokenizer(string, return_tensors="pt", return_token_type_ids=False)).last_hidden_state[0]
        torch.testing.assert_close(embedding, F.normalize(alone.mean(0), dim=0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(teachers.embed_strings(strings, folder, CPU, tmp_path), found)
    assert len(list(tmp_path.iterdir())) == 1
