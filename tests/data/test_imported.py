"""Vectors of another encoder: the same run as with the encoder itself, and what is refused."""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from fedvl.api import RunResult, open_run, run
from fedvl.cli import app
from fedvl.data.encoding import encode_images
from fedvl.data.imported import encoding_in, import_vectors, imported_path, load_imported, open_model
from fedvl.data.inputs import embed_names
from fedvl.data.sources import open_dataset
from fedvl.errors import FedVLError
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder

ROOT = Path(__file__).parents[2]
NAMES = ["cat", "ship", "frog"]
WEIGHTS = hashlib.sha256(b"weights").hexdigest()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of real images as files: eight to train on and four to test with, of each."""
    folder, dataset = tmp_path_factory.mktemp("photos"), open_dataset("cifar10-mini", None, tuple(NAMES))
    for name, count in (("train", 8), ("test", 4)):
        split = dataset.splits[name]
        for label, word in enumerate(dataset.class_names):
            (folder / name / word).mkdir(parents=True)
            for index in np.flatnonzero(split.labels == label)[:count]:
                split.read(int(index)).save(folder / name / word / f"{index}.png")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))


def manifest_of(paths: list[Path], **further: Any) -> dict[str, Any]:
    images = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    return {"name": "mine", "sha256": WEIGHTS, "normalised": False, "images": images, **further}


def write(folder: Path, manifest: dict[str, Any], **arrays: Any) -> tuple[Path, Path]:
    np.savez(folder / "vectors.npz", **arrays)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder / "vectors.npz", folder / "manifest.json"


def ran(photos: Path, out: Path, **settings: Any) -> RunResult:
    given = {"evaluation.examples": 0, "federation.threads": 1, **settings}
    return run(dataset=str(photos), clients=2, rounds=2, partition="iid", out=out, quiet=True, **given)


@pytest.mark.parametrize("method", ["linear", "fed-mp", "fst-cbdg"])
def test_imported_vectors_give_the_run_of_their_encoder(photos: Path, tmp_path: Path, method: str) -> None:
    """The vectors and texts of fedvl-tiny, computed here and imported: the same bits are trained as with the model itself."""
    tiny, paths = load_model("fedvl-tiny"), sorted(photos.rglob("*.png"))
    assert isinstance(tiny, DualEncoder)
    dataset = open_dataset(str(photos))
    pixels = [tiny.preprocess(split.read(row)) for split in dataset.splits.values() for row in range(len(split))]
    names = [split.sha256(row) for split in dataset.splits.values() for row in range(len(split))]
    expected = ran(photos, tmp_path / "own", method=method)
    arrays = {
        "images": encode_images(tiny, "features", pixels).float(),
        "texts": embed_names(dataset.class_names, expected.figures.templates, tiny, "cpu"),
    }
    save_file(arrays, tmp_path / "vectors.safetensors")
    manifest = manifest_of(paths, images=names, classes=list(dataset.class_names), logit_scale=tiny.logit_scale)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    import_vectors(tmp_path / "vectors.safetensors", tmp_path / "manifest.json")
    found = ran(photos, tmp_path / "imported", method=method, model="mine")
    for key in ("state_sha256", "accuracy", "zero_shot_accuracy", "confusion", "right"):
        assert getattr(found.figures, key) == getattr(expected.figures, key), key
    assert found.figures.model_fingerprint != expected.figures.model_fingerprint
    with pytest.raises(FedVLError, match="cannot encode new images"):
        found.predict(paths[0])


def histograms(paths: list[Path]) -> np.ndarray:
    """Another encoder: how often each of eight brightnesses occurs in each colour."""
    from PIL import Image

    pixels = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    counts = [[np.histogram(image[..., channel], 8, (0, 256))[0] for channel in range(3)] for image in pixels]
    return np.array(counts, dtype=np.float32).reshape(len(paths), -1)


def test_an_encoder_of_images_alone_ends_in_a_run_and_a_report(photos: Path, tmp_path: Path) -> None:
    """By the commands, with the lines of the documentation; one image has no vector."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (lines,) = (part for part in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "np.savez" in part)
    weights = tmp_path / "resnet18.pth"
    weights.write_bytes(b"weights")
    paths = sorted(photos.rglob("*.png"))[1:]
    changed = lines.replace('sorted(Path("photos").rglob("*.jpg"))', "given")
    assert changed != lines
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(changed, {"given": paths, "encode": lambda path: histograms([path])[0]})
        commands = CliRunner()
        done = commands.invoke(app, ["features", "import", "vectors.npz", "--manifest", "manifest.json"])
        assert done.output == "35 images and no class texts of 24 numbers each; use --model resnet18.\n"
        settings = ["--set", "method.initial=zeros", "--set", "evaluation.examples=0"]
        asked = ["run", "--dataset", str(photos), "--model", "resnet18", "--method", "linear", "--clients", "2"]
        done = commands.invoke(app, [*asked, "--rounds", "2", *settings, "--out", "found"])
        assert done.exit_code == 0, done.output
        found = open_run("found")
        assert found.report().read_text().count("resnet18") > 0
    assert found.zero_shot_accuracy is None  # without texts there is none
    assert found.accuracy is not None
    (left_out,) = found.figures.skipped_images
    assert left_out.reason == "no vector was imported for it with 'resnet18'."


@pytest.fixture
def imported(photos: Path, tmp_path: Path) -> Path:
    """Without texts."""
    paths = sorted(photos.rglob("*.png"))
    import_vectors(*write(tmp_path, manifest_of(paths), images=histograms(paths)))
    return photos


@pytest.mark.parametrize(
    "method, reason",
    [
        ("promptfl", "needs the text tower of 'mine', of which only vectors were imported"),
        ("fedotp", "needs more of an image than its vector"),
        ("fedavg-nn", "needs more of an image than its vector"),
        ("linear", "No texts of class names were imported"),
        ("fst-cbdg", "No texts of class names were imported"),
        ("fed-prime", "needs a fused model"),
    ],
)
def test_what_needs_a_tower_or_texts_is_refused(imported: Path, tmp_path: Path, method: str, reason: str) -> None:
    with pytest.raises(FedVLError, match=reason):
        ran(imported, tmp_path / "run", method=method, model="mine")


def test_other_images_and_classes_are_named(photos: Path, tmp_path: Path) -> None:
    paths = sorted(photos.rglob("*.png"))
    import_vectors(*write(tmp_path, manifest_of(paths, images=[WEIGHTS]), images=np.ones((1, 4), np.float32)))
    with pytest.raises(FedVLError, match="No image of this dataset is among those"):
        ran(photos, tmp_path / "run", model="mine")
    vectors = histograms(paths)
    import_vectors(*write(tmp_path, manifest_of(paths, classes=["cat"]), images=vectors, texts=vectors[:1]))
    with pytest.raises(FedVLError, match="No text was imported for the class 'frog'"):
        ran(photos, tmp_path / "run", model="mine")


def test_the_fingerprint_is_of_the_encoder_and_not_of_its_images(tmp_path: Path) -> None:
    """Parties have vectors of different images from one encoder."""

    def fingerprint(weights: str, images: int, texts: list[str]) -> str:
        manifest = {
            "name": "mine",
            "sha256": weights,
            "normalised": False,
            "images": [WEIGHTS] * images,
            "classes": texts,
        }
        arrays = {"images": np.ones((images, 4)), "texts": np.ones((len(texts), 4))}
        return import_vectors(*write(tmp_path, manifest, **arrays)).fingerprint

    one = fingerprint(WEIGHTS, 1, ["cat"])
    assert fingerprint(WEIGHTS, 3, ["cat"]) == one
    assert fingerprint("0" * 64, 1, ["cat"]) != one
    assert fingerprint(WEIGHTS, 1, ["dog"]) != one


def test_what_is_kept_is_private_and_verified(tmp_path: Path) -> None:
    manifest = {"name": "mine", "sha256": WEIGHTS, "normalised": True, "images": [WEIGHTS]}
    import_vectors(*write(tmp_path, manifest, images=np.array([[0.6, 0.8]])))
    path = imported_path("mine")
    assert path.stat().st_mode & 0o77 == path.parent.stat().st_mode & 0o77 == 0
    assert open_model("mine").name == "mine"
    with pytest.raises(FedVLError, match=r"leave out model\.encoding"):
        encoding_in(open_model("mine"), "bfloat16")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FedVLError, match="damaged"):
        load_imported("mine")


def npz_of(folder: Path, content: bytes, name: str = "images.npy") -> Path:
    with zipfile.ZipFile(folder / "vectors.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return folder / "vectors.npz"


def npy_header(shape: str, dtype: str = "<f4", length: int = 118) -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(length - 1).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


FILES = {
    "an array of objects, which would be unpickled": (
        npy_header("(2, 4)", "|O") + b"cos\nsystem\n(S'true'\ntR.",
        "floats",
    ),
    "a header of more rows than there is memory for": (npy_header("(10**12, 4)"), r"cannot be read as \.npz"),
    "a claim of more rows than the manifest has": (npy_header("(1000000000000, 4)"), "floats of"),
    "vectors too wide for memory": (npy_header("(2, 1000000000000)"), "floats of"),
    "a bomb of zeros behind few numbers": (npy_header("(2, 4)") + bytes(2**24), "longer than its header says"),
    "fewer numbers than its header says": (npy_header("(2, 4)") + bytes(16), r"cannot be read as \.npz"),
    "integers": (npy_header("(2, 4)", "<i4") + bytes(32), "floats of"),
    "three dimensions": (npy_header("(2, 4, 1)") + bytes(32), "floats of"),
    "a header of brackets": (npy_header("(" * 9_000, length=10_000), r"cannot be read as \.npz"),
    "a header of nested brackets": (npy_header("(" * 4_000 + ")" * 4_000, length=10_000), r"cannot be read as \.npz"),
    "a header of another type": (npy_header("(2, 4)", "<f4', 'x': '1"), r"cannot be read as \.npz"),
    "a header of many dimensions": (npy_header(f"({'1, ' * 3_000})", length=10_000), "floats of"),
    "a header of half a text": (npy_header("(2, 4), 'x"), r"cannot be read as \.npz"),
    "no numpy at all": (b"PK", r"cannot be read as \.npz"),
    "a header that is a program": (npy_header("(__import__('os').getpid(), 4)"), r"cannot be read as \.npz"),
    "numbers that are not finite": (
        npy_header("(2, 4)") + bytes(28) + b"\x00\x00\xc0\x7f",
        "Row 1 of images .* not finite",
    ),
    "a vector of zeros": (npy_header("(2, 4)") + b"\x00\x00\x80\x3f" * 4 + bytes(16), "Row 1 of images .* all zeros"),
}


@pytest.mark.parametrize("case", FILES)
def test_hostile_vectors_end_in_one_sentence(tmp_path: Path, case: str) -> None:
    content, reason = FILES[case]
    manifest = {"name": "mine", "sha256": WEIGHTS, "normalised": False, "images": [WEIGHTS] * 2}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FedVLError, match=reason) as caught:
        import_vectors(npz_of(tmp_path, content), tmp_path / "manifest.json")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert not imported_path("mine").exists()


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"name": "../mine"}, "name: String should match pattern"),
        ({"name": "fedvl-tiny"}, "name of an embedded model"),
        ({"sha256": "none"}, "sha256: String should match"),
        ({"images": []}, "images: List should have at least 1 item"),
        ({"images": [WEIGHTS] * 3}, "floats of .3, 1 to"),
        ({"normalised": True}, "Row 0 of images .* has length 2"),
        ({"normalised": "no"}, "normalised: Input should be a valid boolean"),
        ({"logit_scale": float("nan")}, "logit_scale"),
        ({"classes": ["cat"]}, "needs images and texts"),
        ({"command": "rm"}, "command: Extra inputs are not permitted"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    manifest = {"name": "mine", "sha256": WEIGHTS, "normalised": False, "images": [WEIGHTS] * 2, **change}
    with pytest.raises(FedVLError, match=reason):
        import_vectors(*write(tmp_path, manifest, images=np.ones((2, 4), np.float32)))


def test_a_manifest_that_is_not_there_or_no_json_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "vectors.npz").write_bytes(b"x")
    with pytest.raises(FedVLError, match=r"Cannot read the manifest .*: No such file or directory; check the path"):
        import_vectors(tmp_path / "vectors.npz", tmp_path / "absent.json")
    (tmp_path / "manifest.json").write_bytes(b"{")
    with pytest.raises(FedVLError, match="is not JSON"):
        import_vectors(tmp_path / "vectors.npz", tmp_path / "manifest.json")


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    _, manifest = write(tmp_path, {"name": "mine", "sha256": WEIGHTS, "normalised": False, "images": [WEIGHTS]})
    for name, content, reason in (
        ("vectors.pt", b"x", "neither .npz nor .safetensors"),
        ("vectors.npz", b"x" * 100, r"cannot be read as \.npz"),
        ("vectors.safetensors", b"x" * 100, "safetensors"),
        ("more.npz", b"", r"cannot be read as \.npz"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FedVLError, match=reason):
            import_vectors(tmp_path / name, manifest)
    with pytest.raises(FedVLError, match="an array 'others' that is not expected"):
        import_vectors(npz_of(tmp_path, npy_header("(1, 4)"), "others.npy"), manifest)
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(FedVLError, match="nested too deeply"):
        import_vectors(tmp_path / "vectors.npz", manifest)


def tensors_of(header: Any, data: bytes = bytes(4)) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "header",
    [
        {"x" * 10**6: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {f"x{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(10**4)}
        | {"images": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"images": {"dtype": "F32", "shape": [1] * 10**4, "data_offsets": [0, 4]}},
        {"images": {"dtype": "y" * 10**6, "shape": [1], "data_offsets": [0, 4]}},
    ],
    ids=["a long name", "many names", "many dimensions", "a long type"],
)
def test_a_long_header_of_safetensors_is_not_quoted(tmp_path: Path, header: dict[str, Any]) -> None:
    _, manifest = write(tmp_path, {"name": "mine", "sha256": WEIGHTS, "normalised": False, "images": [WEIGHTS]})
    (tmp_path / "vectors.safetensors").write_bytes(tensors_of(header))
    with pytest.raises(FedVLError) as caught:
        import_vectors(tmp_path / "vectors.safetensors", manifest)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
