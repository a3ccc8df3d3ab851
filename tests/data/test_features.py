"""The feature cache: right numbers, found again, never trusted when damaged, whole or absent."""

import hashlib
import json
import multiprocessing
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fedvl.data import encoding, features, staging
from fedvl.data.decoders import Decoders
from fedvl.data.encoding import encode_images
from fedvl.data.features import default_cache_dir, encode_split, ship_features
from fedvl.data.images import BadImage
from fedvl.data.sources import open_dataset
from fedvl.data.stored import DiskRows
from fedvl.data.stores import FileStore, Split
from fedvl.errors import FedVLError
from fedvl.models.checkpoint import load_model
from fedvl.models.preprocessing import Preprocessing

SHIPPED = features.SHIPPED


class Pictures:
    """Images of one colour each, so that what an encoder makes of them can be worked out by hand."""

    def __init__(self, count=10, bad=(), shift=0):
        self.count, self.bad, self.shift = count, set(bad), shift

    @property
    def identity(self):
        return hashlib.sha256(f"{self.count} {sorted(self.bad)} {self.shift}".encode()).hexdigest()

    def __len__(self):
        return self.count

    def read(self, index):
        if index in self.bad:
            raise BadImage("the file is empty (0 bytes).")
        return Image.new("RGB", (6, 6), ((index + self.shift) % 256, 100, 200))

    def source(self, index):
        return None

    def describe(self, index):
        return f"picture-{index}.png"

    def content(self, index):
        return f"{(index + self.shift) % 256} {index in self.bad}".encode()


class Doubling(torch.nn.Module):
    """The mean of each channel, times a weight; it counts how often it is asked."""

    name = "doubling"
    encoding = "float32"
    preprocessing = Preprocessing(4, 4)

    def __init__(self, weight=2.0, size=4):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight), requires_grad=False)
        self.size = size
        self.asked = 0

    @property
    def fingerprint(self):
        return hashlib.sha256(f"{float(self.weight)} {self.size}".encode()).hexdigest()

    def preprocess(self, image):
        return torch.from_numpy(np.array(image.resize((self.size, self.size)))).permute(2, 0, 1)

    def normalise(self, pixels):
        return pixels.float()

    def encode_image(self, pixels, prompts=None):
        self.asked += real(pixels)
        return pixels.mean((2, 3)) * self.weight

    def encode_patches(self, pixels, prompts=None):
        return self.encode_image(pixels), pixels.flatten(2).transpose(1, 2) * self.weight


def table_of(encoded):
    assert isinstance(encoded.rows, DiskRows)
    return encoded.rows.table


def real(pixels):
    """Images that are not padding, which is black."""
    return int(pixels.flatten(1).any(1).sum())


def expected(indices):
    return torch.tensor([[2.0 * index, 200.0, 400.0] for index in indices])


def files(folder):
    return sorted(path.suffix for path in folder.iterdir())


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch, tmp_path):
    monkeypatch.setattr(features, "SHIPPED", tmp_path / "shipped")


def test_features_are_those_of_the_encoder_and_are_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "READ_AT_ONCE", 4)
    encoder, calls = Doubling(), []
    first = encode_split(Pictures(10), encoder, "features", tmp_path, lambda done, total: calls.append((done, total)))
    assert torch.equal(first.tensor, expected(range(10)))
    assert first.tensor.dtype == torch.float32
    assert (first.kept.tolist(), first.bad, first.note) == (list(range(10)), [], "")
    assert calls == [(4, 10), (8, 10), (10, 10)]
    assert encoder.asked == 10
    again = encode_split(Pictures(10), encoder, "features", tmp_path, lambda *_: pytest.fail("encoded again"))
    assert encoder.asked == 10
    assert torch.equal(again.tensor, first.tensor)
    next(tmp_path.glob("*.lock")).unlink()
    encode_split(Pictures(10), encoder, "features", tmp_path)  # what is there is read without a lock, so also read-only
    assert files(tmp_path) == [".index", ".rows"]


def test_next_month_costs_the_new_images(tmp_path):
    """3,000 images and then 28 among them, under other names and in another order."""

    class Month(Pictures):
        def __init__(self, numbers):
            super().__init__(len(numbers))
            self.numbers = numbers

        def read(self, index):
            number = self.numbers[index]
            return Image.new("RGB", (6, 6), (number % 256, number // 256, 200))

        def content(self, index):
            return str(self.numbers[index]).encode()

    first, encoder = Month(range(3000)), Doubling()
    encode_split(first, encoder, "features", tmp_path)
    assert encoder.asked == 3000
    numbers = np.random.default_rng(0).permutation(3028).tolist()
    second = encode_split(Month(numbers), encoder, "features", tmp_path)
    assert encoder.asked == 3028
    assert 28 <= 0.05 * 3000
    assert torch.equal(second.tensor, torch.tensor([[2.0 * (n % 256), 2.0 * (n // 256), 400.0] for n in numbers]))
    assert files(tmp_path) == [".index", ".lock", ".rows"]


def test_rows_are_mapped_not_read(tmp_path):
    encoded = encode_split(Pictures(3), Doubling(), "features", tmp_path)
    assert isinstance(encoded.rows, DiskRows)
    before = table_of(encoded).path.read_bytes()
    assert before == expected(range(3)).half().numpy().tobytes()
    encoded.tensor.add_(1)  # in memory: the file is as it was
    assert table_of(encoded).path.read_bytes() == before


def test_features_are_rounded_to_sixteen_bits_and_used_as_thirty_two(tmp_path):
    encoded = encode_split(Pictures(5), Doubling(weight=1 / 3), "features", tmp_path)
    exact = torch.tensor([[float(index), 100.0, 200.0] for index in range(5)]) * torch.tensor(1 / 3)
    assert torch.equal(encoded.tensor, exact.half().float())
    assert not torch.equal(encoded.tensor, exact)


def test_pixels_and_patches(tmp_path):
    pixels = encode_split(Pictures(3), Doubling(), "pixels", tmp_path)
    assert pixels.tensor.dtype == torch.uint8
    assert pixels.tensor.shape == (3, 3, 4, 4)
    assert pixels.tensor[2, 0].unique().tolist() == [2]
    patches = encode_split(Pictures(3), Doubling(), "patches", tmp_path)
    assert patches.tensor.dtype == torch.float16
    assert patches.tensor.shape == (3, 16, 3)
    assert patches.tensor[2, 7].tolist() == [4, 200, 400]
    again = encode_split(Pictures(3), Doubling(), "patches", tmp_path)
    assert torch.equal(again.tensor, patches.tensor)


def test_weights_preprocessing_and_kind_each_have_their_own_table(tmp_path):
    entries = [
        table_of(encode_split(split, encoder, kind, tmp_path)).path
        for split, encoder, kind in [
            (Pictures(), Doubling(), "features"),
            (Pictures(), Doubling(weight=2.5), "features"),
            (Pictures(), Doubling(size=5), "features"),
            (Pictures(), Doubling(), "pixels"),
        ]
    ]
    assert len(set(entries)) == 4
    assert entries[0].name.startswith("features-")
    assert torch.equal(encode_split(Pictures(), Doubling(), "features", tmp_path).tensor, expected(range(10)))


def test_bad_images_are_skipped_counted_and_named(tmp_path):
    for _ in range(2):  # made, then found
        encoded = encode_split(Pictures(10, bad=(0, 4, 5, 9)), Doubling(), "features", tmp_path)
        assert encoded.kept.tolist() == [1, 2, 3, 6, 7, 8]
        assert torch.equal(encoded.tensor, expected(encoded.kept))
        assert encoded.bad[1] == ("picture-4.png", "the file is empty (0 bytes).")
        assert [name for name, _ in encoded.bad] == [f"picture-{index}.png" for index in (0, 4, 5, 9)]


def test_features_that_are_not_finite_are_bad_images(tmp_path):
    class Breaking(Doubling):
        def encode_image(self, pixels, prompts=None):
            rows = super().encode_image(pixels)
            rows[rows[:, 0] == 6] = torch.nan  # picture 3
            return torch.where(rows == 14, 1e6, rows)  # picture 7: too large for 16 bits

    encoded = encode_split(Pictures(10, bad=(8,)), Breaking(), "features", tmp_path)
    assert encoded.kept.tolist() == [0, 1, 2, 4, 5, 6, 9]
    assert torch.equal(encoded.tensor, expected(encoded.kept))
    reason = "the model gives numbers for it that are not finite."
    assert encoded.bad[:2] == [("picture-3.png", reason), ("picture-7.png", reason)]


def test_no_usable_image_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(
        FedVLError, match=r"None of the 3 images can be used \(the first is picture-0.png: the file is emp"
    ):
        encode_split(Pictures(3, bad=range(3)), Doubling(), "features", tmp_path)
    assert files(tmp_path) == [".lock"]


def test_wrong_requests_are_one_sentence(tmp_path):
    with pytest.raises(FedVLError, match="no kind of feature called 'tokens'"):
        encode_split(Pictures(), Doubling(), "tokens", tmp_path)
    with pytest.raises(FedVLError, match="There are no images to encode"):
        encode_split(Pictures(0), Doubling(), "features", tmp_path)

    class OnlyPixels:
        name, fingerprint = "fused", "f"
        preprocess, normalise = Doubling.preprocess, Doubling.normalise
        size = 4

    only_pixels: Any = OnlyPixels()
    with pytest.raises(FedVLError, match="Model fused does not encode images separately from texts"):
        encode_split(Pictures(), only_pixels, "features", tmp_path)
    assert encode_split(Pictures(2), only_pixels, "pixels", tmp_path).tensor.shape == (2, 3, 4, 4)


def test_images_of_several_shapes_are_refused(tmp_path, monkeypatch):
    class Proportional(Doubling):
        def preprocess(self, image):
            red = image.getpixel((0, 0))[0]
            return torch.zeros(3, 4, 4 if red < 6 else 5, dtype=torch.uint8)

    for at_once in (6, 10):  # across two batches, and within one
        monkeypatch.setattr(encoding, "READ_AT_ONCE", at_once)
        with pytest.raises(FedVLError, match="images of several shapes cannot be cached as one array"):
            encode_split(Pictures(10), Proportional(), "pixels", tmp_path / str(at_once))


def damaged_copies(path, seed):
    """(what was done, bytes) for truncations at 25 places and 50 flipped bits of a file."""
    content = path.read_bytes()
    generator = np.random.default_rng(seed)
    edges = (0, 1, 7, 8, len(content) - 1)
    for length in (*edges, *(9 + generator.choice(len(content) - 10, size=20, replace=False)).tolist()):
        yield f"cut to {length}", content[:length]
    for position in generator.choice(8 * len(content), size=50, replace=False).tolist():
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << (position % 8)
        yield f"bit {position} flipped", bytes(flipped)


@pytest.mark.parametrize("suffix", [".rows", ".index"])
def test_no_damage_gives_other_features(tmp_path, suffix):
    split, encoder = Pictures(6, bad=(2,)), Doubling()
    good = encode_split(split, encoder, "features", tmp_path)
    path = next(tmp_path.glob(f"*{suffix}"))
    kept = {each: each.read_bytes() for each in tmp_path.iterdir()}
    for what, content in damaged_copies(path, seed=len(suffix)):
        for each, original in kept.items():
            each.unlink()
            each.write_bytes(original)
        path.write_bytes(content)
        encoder.asked = 0
        mended = encode_split(split, encoder, "features", tmp_path)
        assert torch.equal(mended.tensor, expected([0, 1, 3, 4, 5])), what
        assert mended.bad == good.bad
        if encoder.asked == 5:  # else some rows were as written
            assert mended.note.startswith(f"Some of the features in {tmp_path}") or suffix == ".index", what
        assert encoder.asked <= 5
        encoder.asked = 0
        again = encode_split(split, encoder, "features", tmp_path)
        assert (encoder.asked, again.note) == (0, ""), what


def test_a_damaged_row_is_computed_again_and_the_others_are_not(tmp_path):
    split, encoder = Pictures(6), Doubling()
    encode_split(split, encoder, "features", tmp_path)
    rows = next(tmp_path.glob("*.rows"))
    content = bytearray(rows.read_bytes())
    content[2 * 3 * 4] ^= 1  # the first byte of the fifth row, of 3 numbers in 16 bits
    rows.write_bytes(bytes(content))
    encoder.asked = 0
    mended = encode_split(split, encoder, "features", tmp_path)
    assert mended.note == (
        f"Some of the features in {rows} were computed again because their SHA-256 is not the one that was written."
    )
    assert encoder.asked == 1
    assert torch.equal(mended.tensor, expected(range(6)))


def test_rows_that_changed_places_are_found(tmp_path):
    """Each is whole, but of another image."""
    split, encoder = Pictures(2), Doubling()
    encode_split(split, encoder, "features", tmp_path)
    rows = next(tmp_path.glob("*.rows"))
    content = rows.read_bytes()
    rows.write_bytes(content[6:] + content[:6])
    assert torch.equal(encode_split(split, encoder, "features", tmp_path).tensor, expected(range(2)))


def test_missing_files_other_data_and_other_versions_are_mended(tmp_path):
    split, encoder = Pictures(6), Doubling()
    encode_split(split, encoder, "features", tmp_path)
    index, rows = (next(tmp_path.glob(f"*{suffix}")) for suffix in (".index", ".rows"))

    def other_version():
        content = index.read_bytes()
        described = json.loads(content[: features.INDEX_HEAD])
        described["format"] += 1
        described["seal"] = features._seal(described)
        index.write_bytes(json.dumps(described).encode().ljust(features.INDEX_HEAD) + content[features.INDEX_HEAD :])

    def link(path):
        path.rename(path.with_suffix(".elsewhere"))
        path.symlink_to(path.with_suffix(".elsewhere"))

    damages: list[Callable[[], object]] = [
        rows.unlink,
        index.unlink,
        lambda: index.write_text("[]"),
        lambda: index.write_bytes(b""),
        other_version,
        lambda: link(index),
    ]
    for damage in damages:
        damage()
        mended = encode_split(split, encoder, "features", tmp_path)
        assert "were computed again because" in mended.note
        assert torch.equal(mended.tensor, expected(range(6)))
        assert encode_split(split, encoder, "features", tmp_path).note == ""
    shutil.rmtree(tmp_path)
    assert encode_split(split, encoder, "features", tmp_path).note == ""


def test_an_interrupted_encoding_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "READ_AT_ONCE", 4)

    class Interrupted(Doubling):
        def encode_image(self, pixels, prompts=None):
            if self.asked == 8:
                raise KeyboardInterrupt
            return super().encode_image(pixels)

    with pytest.raises(KeyboardInterrupt):
        encode_split(Pictures(20), Interrupted(), "features", tmp_path)
    child = multiprocessing.get_context("fork").Process(target=die_while_encoding, args=(tmp_path,))
    child.start()
    child.join()
    encoder = Doubling()
    encoded = encode_split(Pictures(20), encoder, "features", tmp_path)
    assert torch.equal(encoded.tensor, expected(range(20)))
    assert encoded.note == ""
    assert encoder.asked == 20 - 4 - 4  # a batch is noted when the next one is launched


def test_processes_decode_for_a_gpu_only_where_images_are_not_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "BATCHES", {("cpu", "float32"): 8})
    monkeypatch.setattr(staging, "WORTH_PROCESSES", 3)
    monkeypatch.setattr(staging, "DECODING_PROCESSES", 2)
    begun: list[Decoders] = []

    class Watched(Decoders):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            begun.append(self)

    monkeypatch.setattr(staging, "Decoders", Watched)
    names = [tmp_path / f"{number}.png" for number in range(14)]
    for number, name in enumerate(names):
        Image.new("RGB", (90, 60 + number % 2), (20 * number % 256, 100, 250 - number)).save(name)
    tiny = load_model("fedvl-tiny")

    def encoded(*chosen):
        split = Split(
            FileStore(names, [name.name for name in names]), np.array(chosen), np.zeros(len(chosen), np.int64)
        )
        return encode_split(split, tiny, "features", tmp_path / "cache").tensor

    some = encoded(*range(10))
    assert torch.equal(
        some, encode_images(tiny, "features", [tiny.preprocess(Image.open(n)) for n in names[:10]]).float()
    )
    assert [each.process.returncode for each in begun] == [0]
    assert torch.equal(encoded(*range(9, -1, -1)), some.flip(0))
    assert len(begun) == 1  # all are in the table
    assert torch.equal(encoded(*range(1, 12))[:9], some[1:])
    assert len(begun) == 1  # two images are few
    assert len(encoded(10, 11, 12, 13, 12, 13)) == 6
    assert len(begun) == 2  # the table has as many rows as there are images, but not theirs
    assert [each.process.returncode for each in begun] == [0, 0]


def die_while_encoding(folder):
    class Dying(Doubling):
        def encode_image(self, pixels, prompts=None):
            if self.asked == 8:
                os._exit(9)
            return super().encode_image(pixels)

    encode_split(Pictures(20), Dying(), "features", folder)


def test_a_row_and_a_record_that_were_cut_off_are_written_over(tmp_path):
    encode_split(Pictures(3), Doubling(), "features", tmp_path)
    for suffix in (".rows", ".index"):
        with open(next(tmp_path.glob(f"*{suffix}")), "ab") as file:
            file.write(b"half")
    encoder = Doubling()
    assert torch.equal(encode_split(Pictures(7), encoder, "features", tmp_path).tensor, expected(range(7)))
    assert encoder.asked == 4
    assert torch.equal(encode_split(Pictures(7), encoder, "features", tmp_path).tensor, expected(range(7)))
    assert encoder.asked == 4


def race(folder, rounds, barrier, results):
    torch.set_num_threads(1)
    made, right = 0, True
    for number in range(rounds):
        encoder = Doubling()
        barrier.wait()
        encoded = encode_split(Pictures(20, shift=20 * number), encoder, "features", folder)
        made += encoder.asked
        right &= torch.equal(encoded.tensor[:, 0], 2.0 * torch.arange(20 * number, 20 * number + 20))
        right &= encoded.note == ""
    results.put((made, bool(right)))


def test_processes_that_race_encode_each_image_once(tmp_path):
    context = multiprocessing.get_context("fork")
    processes, rounds = 3, 12
    barrier, results = context.Barrier(processes), context.Queue()
    children = [context.Process(target=race, args=(tmp_path, rounds, barrier, results)) for _ in range(processes)]
    for child in children:
        child.start()
    outcomes = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    assert all(right for _, right in outcomes)
    assert sum(made for made, _ in outcomes) == 20 * rounds
    assert files(tmp_path) == [".index", ".lock", ".rows"]


@pytest.mark.parametrize("limit", [0, 100, 600, 5_000])
def test_a_full_disk_is_one_sentence_and_what_was_written_counts(tmp_path, limit):
    # 200 records of 72 bytes are 14,400 bytes; a limit on the size of a file fails as a full disk does.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(
            FedVLError, match=r"cannot be written \(File too large\); free some space there, or set FEDVL_"
        ):
            encode_split(Pictures(200), Doubling(), "features", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    encoder = Doubling()
    assert torch.equal(encode_split(Pictures(200), encoder, "features", tmp_path).tensor, expected(range(200)))
    assert encoder.asked == 200 - max(0, limit - features.INDEX_HEAD) // 72


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedVLError, match=r"feature cache in .*file/cache cannot be written \(Not a directory\)"):
        encode_split(Pictures(), Doubling(), "features", tmp_path / "file" / "cache")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_is_read_and_not_written(tmp_path):
    encode_split(Pictures(3), Doubling(), "features", tmp_path)
    tmp_path.chmod(0o500)
    assert torch.equal(encode_split(Pictures(3), Doubling(), "features", tmp_path).tensor, expected(range(3)))
    with pytest.raises(FedVLError, match="cannot be written"):
        encode_split(Pictures(4), Doubling(), "features", tmp_path)


def test_shipped_features_equal_those_made_on_the_spot(tmp_path):
    split, encoder = Pictures(7, bad=(3,)), Doubling(weight=1 / 3)
    made = encode_split(split, encoder, "features", tmp_path / "cache")
    path = ship_features(split, encoder, features.SHIPPED)
    assert files(features.SHIPPED) == [".json", ".safetensors"]
    assert load_file(path)["features"].dtype == torch.float16
    encoder.asked = 0
    shipped = encode_split(split, encoder, "features", tmp_path / "unused")
    assert encoder.asked == 0
    assert not (tmp_path / "unused").exists()
    assert table_of(shipped).path == path
    assert shipped.tensor.dtype == torch.float32
    assert torch.equal(shipped.tensor, made.tensor)
    assert (shipped.bad, shipped.kept.tolist()) == (made.bad, made.kept.tolist())


def test_damaged_shipped_features_are_not_used(tmp_path):
    split, encoder = Pictures(7), Doubling()
    path = ship_features(split, encoder, features.SHIPPED)
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    encoded = encode_split(split, encoder, "features", tmp_path / "cache")
    assert torch.equal(encoded.tensor, expected(range(7)))
    assert table_of(encoded).path.parent == tmp_path / "cache"
    assert encoded.note == (
        "The features that came with the package were not used because its SHA-256 is not the one that was written."
    )
    assert path.read_bytes() == bytes(content)


def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "chosen"))
    assert default_cache_dir() == tmp_path / "chosen"
    assert table_of(encode_split(Pictures(2), Doubling(), "features")).path.parent == tmp_path / "chosen"
    monkeypatch.delenv("FEDVL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "fedvl" / "features"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "fedvl" / "features"


@pytest.fixture(scope="module")
def tiny():
    return load_model("fedvl-tiny")


@pytest.mark.parametrize("dataset", ["cifar10-mini", "emoji-mini"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_the_package_ships_features_of_its_images_under_its_model(monkeypatch, tmp_path, tiny, dataset, part):
    """Where this fails after a change of model, preprocessing or images: python tools/make_embedded_features.py."""
    monkeypatch.setattr(features, "SHIPPED", SHIPPED)
    split = open_dataset(dataset).splits[part]
    encoded = encode_split(split, tiny, "features", tmp_path / "unused", lambda done, total: pytest.fail("made again"))
    assert table_of(encoded).path.parent == SHIPPED
    assert (encoded.kept.tolist(), encoded.bad, encoded.note) == (list(range(len(split))), [], "")
    assert encoded.tensor.shape == (len(split), tiny.dim)
    some = range(0, len(split), len(split) // 6)
    pixels = torch.stack([tiny.preprocess(split.read(index)) for index in some])
    exact = tiny.encode_image(tiny.normalise(pixels))
    assert torch.allclose(encoded.tensor[list(some)], exact, rtol=1e-3, atol=1e-3)


def test_shipped_features_stay_small():
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 3_000_000
    assert files(SHIPPED) == [".json"] * 4 + [".safetensors"] * 4


def test_a_weight_of_a_real_model_is_in_the_key(tiny):
    other = load_model("fedvl-tiny")
    assert features.table_key(other, "features") == features.table_key(tiny, "features")
    changed: Any = load_model("fedvl-tiny")
    changed.visual.proj.data[0, 0] += 1e-3
    assert features.table_key(changed, "features") != features.table_key(tiny, "features")


def test_each_precision_of_encoding_has_its_own_features(tmp_path, tiny):
    lower = tiny.encoding_in("bfloat16")
    exact = encode_split(Pictures(8), tiny, "features", tmp_path)
    rounded = encode_split(Pictures(8), lower, "features", tmp_path)
    assert tiny.encoding == "float32"
    assert table_of(encode_split(Pictures(8), tiny, "features", tmp_path)) == table_of(exact) != table_of(rounded)
    pixels = torch.stack([tiny.preprocess(Pictures(8).read(index)) for index in range(8)])
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = tiny.encode_image(tiny.normalise(pixels)).half().float()
    assert torch.equal(rounded.tensor, expected)
    assert not torch.equal(rounded.tensor, exact.tensor)
    assert torch.cosine_similarity(rounded.tensor, exact.tensor).min() > 0.999


def test_only_the_owner_reads_the_cache_whatever_the_umask(tmp_path):
    """Tried on version 0.1: a client's cache was 0644 in 0755."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        encode_split(Pictures(), Doubling(), "features", folder)
        encode_split(Pictures(), Doubling(), "features", tmp_path / "new")
    finally:
        os.umask(before)
    for place in (folder, tmp_path / "new"):
        assert place.stat().st_mode & 0o777 == 0o700
        assert {path.suffix: path.stat().st_mode & 0o777 for path in place.iterdir()} == {
            ".index": 0o600,
            ".lock": 0o600,
            ".rows": 0o600,
        }
