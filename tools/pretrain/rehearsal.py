"""Made-up data in the layout of the real data, so that every command can be rehearsed without it.

    python -m tools.pretrain.rehearsal --out W

writes the git repositories W/tiny, W/flickr and W/fruits, the sets W/data, W/wordnet, and two teachers with random
weights, W/r50.safetensors and W/sentences: kilobytes of noise in flat colours, from which nothing can be learnt.
"""

import argparse
import csv
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel

from tools.pretrain import build_dev, concepts, teachers

ROOT = "n00001740"  # "entity"


def synset_line(synset: str, names: list[str], parents: list[str], gloss: str, symbol: str = "@") -> str:
    words = " ".join(f"{name.replace(' ', '_')} 0" for name in names)
    links = " ".join(f"{symbol} {parent[1:]} n 0000" for parent in parents)
    return f"{synset[1:]} 03 n {len(names):02x} {words} {len(parents):03d} {links} | {gloss}\n"


def class_ids(classes: int) -> list[str]:
    return [f"n{50000000 + number:08d}" for number in range(classes)]


def write_wordnet(folder: Path, classes: int) -> None:
    """A few real synset ids that the tool knows by number, and `classes` made-up kinds of animal and artefact."""
    folder.mkdir()
    synsets = [
        (ROOT, ["entity"], [], "that which is perceived (or known) to exist"),
        (concepts.PHYSICAL, ["physical entity"], [ROOT], "an entity that has physical existence"),
        (concepts.ANIMAL, ["animal", "beast"], [concepts.PHYSICAL], 'a living organism that moves; "it moved"'),
        (concepts.PLANT, ["plant"], [concepts.PHYSICAL], "a living organism that does not move"),
        (concepts.FOOD, ["food"], [concepts.PHYSICAL], "what can be eaten (by somebody)"),
        (concepts.ARTEFACT, ["artifact"], [concepts.PHYSICAL], "a man-made object taken as a whole"),
        (concepts.FRUIT_PLANT, ["fruit"], [concepts.PLANT], "the ripened body of a seed plant"),
        (concepts.EDIBLE_FRUIT, ["edible fruit"], [concepts.FOOD], "edible body of a seed plant"),
        (concepts.BIRD, ["bird"], [concepts.ANIMAL], "an animal with feathers"),
        (concepts.CAR, ["car", "automobile"], [concepts.ARTEFACT], "a motor vehicle with four wheels"),
        ("n60000001", ["warbler"], [concepts.BIRD], "a small bird that sings"),
        ("n60000002", ["sedan"], [concepts.CAR], "a car that is closed"),
        ("n60000003", ["apple"], [concepts.EDIBLE_FRUIT], "fruit with a red or green skin"),
        ("n60000004", ["leopard"], [concepts.ANIMAL], "a large spotted feline"),
        ("n60000005", ["chair"], [concepts.ARTEFACT], "a seat for one person"),
    ]
    letters = ["".join(word) for word in product("abcdefghij", repeat=3)]
    for number, synset in enumerate(class_ids(classes)):
        parent = (concepts.ANIMAL, concepts.ARTEFACT, concepts.BIRD, concepts.CAR)[number % 4]
        synsets.append((synset, [f"zo{letters[number]}"], [parent], f"the kind with number {number}"))
    lines = [synset_line(*synset) for synset in synsets]
    lines.append(synset_line("n70000001", ["Paris"], [ROOT], "one particular town", "@i"))
    (folder / "data.noun").write_text("  1 a licence\n" + "".join(lines))
    senses: dict[str, list[str]] = {"Paris": ["n70000001"]}
    for synset, names, _, _ in synsets:
        for name in names:
            senses.setdefault(name, []).append(synset)
    senses["bird"] = [ROOT, concepts.BIRD]  # the commonest sense is not the one below "bird"
    index = [
        f"{name.lower().replace(' ', '_')} n {len(of)} 1 @ {len(of)} 0 {' '.join(synset[1:] for synset in of)}\n"
        for name, of in senses.items()
    ]
    (folder / "index.noun").write_text("  1 a licence\n" + "".join(index))
    (folder / "index.adj").write_text("  1 a licence\nred a 1 0 1 0 00000001\nx-ray a 1 0 1 0 00000002\n")
    (folder / "index.verb").write_text("run v 1 0 1 0 00000001\nbe v 1 0 1 0 00000002\n")


def write_image(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (64, 64)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(sum(colour)).integers(0, 40, (size[1], size[0], 3))
    Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(path, "JPEG")


def write_set(root: Path, name: str, rows: list[dict[str, str]]) -> None:
    """A folder with split.csv whose rows share one image a class."""
    for row in rows:
        shade = sum(map(ord, row["class"])) * 37
        row["path"] = f"{row['class']}.jpg"
        if not (root / name / row["path"]).exists():
            write_image(root / name / row["path"], (shade % 200, shade // 3 % 200, shade // 7 % 200), (70, 90))
    with (root / name / "split.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def commit(repository: Path) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "data"]):
        subprocess.run(["git", *command], cwd=repository, check=True)


def write_sentence_teacher(folder: Path, width: int) -> None:
    folder.mkdir()
    config = BertConfig(
        vocab_size=300,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    config.to_json_file(folder / "config.json", use_diff=False)
    save_file(BertModel(config).state_dict(), folder / "model.safetensors")
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = list("abcdefghijklmnopqrstuvwxyz:,-'")
    trainer = trainers.BpeTrainer(vocab_size=60, initial_alphabet=letters, special_tokens=["[PAD]", "[UNK]"])
    tokenizer.train_from_iterator(["a photo of a bird"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_sources(root: Path, classes: int, sentence_width: int) -> None:
    """Everything that the commands read, in its real layout, under `root`."""
    root.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    ids = class_ids(classes)
    write_wordnet(root / "wordnet", classes)
    for number, synset in enumerate(ids[:4]):
        for image in range(7):
            path = root / f"tiny/tiny-imagenet-200/train/{synset}/images/{synset}_{image}.JPEG"
            write_image(path, (40 * number, 200 - 40 * number, 10 * image))
    commit(root / "tiny")
    captions = []
    for number in range(10):
        write_image(root / f"flickr/Flicker8k_Dataset/{number}.jpg", (20 * number, 90, 30), (100, 80))
        captions += [f"{number}.jpg#{k}\tA dog  number {number} runs {'very ' * k}fast ." for k in range(5)]
    text = root / "flickr/Flicker8k_text"
    text.mkdir()
    (text / "Flickr8k.token.txt").write_text("\n".join(captions) + "\n")
    (text / "Flickr_8k.testImages.txt").write_text("".join(f"{number}.jpg\n" for number in range(6, 10)))
    commit(root / "flickr")
    for number in range(30):
        write_image(root / f"fruits/Training/Apple Golden 1/{number}.jpg", (200, number, 0))
    commit(root / "fruits")

    data = root / "data"
    caltech = ["BACKGROUND_Google"] * 2 + ["Leopards"] * 7 + ["windsor_chair"] * 6
    write_set(data, "caltech101", [{"path": "", "class": name, "split": "all"} for name in caltech])
    birds = [{"path": "", "class": "Yellow_Warbler", "split": split} for split in ("train", "train", "test")]
    write_set(data, "cub200", birds)
    cars = [{"path": "", "class": f"Made-Up X{number} Sedan 2012", "split": "train"} for number in range(2)]
    write_set(data, "stanford_cars_train", cars)
    sample = [{"path": "", "class": "any", "split": "train", "wnid": synset} for synset in ids]
    write_set(data, "imagenet-sample-1000", sample)
    for name, split, _ in build_dev.SAMPLES[1:-1]:
        names = ["Forest", "River"] if name == "eurosat_rgb" else ["red_thing", "blue_thing"]
        rows = [{"path": "", "class": c, "split": s, "coarse": "Fruit"} for c in names for s in (split, "test") * 4]
        write_set(data, name, rows)
    generator = np.random.default_rng(0)
    arrays = {}
    for split in ("train", "test"):
        arrays[f"x_{split}"] = generator.integers(0, 255, (12, 32, 32, 3), np.uint8)
        arrays[f"y_{split}"] = np.arange(12) % 3
    (data / "cifar10").mkdir()
    np.savez(data / "cifar10/cifar10.npz", classes=np.array(["cat", "dog", "ship"]), **arrays)
    products = [{"path": "", "class": c, "split": "all", "text": f"a {c} shoe"} for c in ("red", "blue") * 10]
    write_set(data, "products", products)

    tensors = teachers.ResNet50(classes).state_dict()
    tensors = {name: value.half() if value.ndim > 1 else value for name, value in tensors.items()}
    save_file(tensors, root / "r50.safetensors")
    write_sentence_teacher(root / "sentences", sentence_width)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder to write to")
    parser.add_argument("--classes", type=int, default=8, help="ImageNet classes to make up (default: %(default)s)")
    parser.add_argument("--sentence-width", type=int, default=16, help="of the embeddings (default: %(default)s)")
    options = parser.parse_args(arguments)
    write_sources(options.out, options.classes, options.sentence_width)


if __name__ == "__main__":
    main()
