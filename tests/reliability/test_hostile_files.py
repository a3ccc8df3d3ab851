"""Files that want code to be run, or memory to be filled, wherever FedVL opens a file: none of them gets its way.

Tarballs with links and with members outside their folder are in tests/data/test_fetch.py, images in tests/data/test_images.py.
"""

import io
import pickle
import shutil
import zipfile

import numpy as np
import pytest
import torch
from helpers.bad_updates import Canary

import fedvl
from fedvl.config import read_toml
from fedvl.data.images import BadImage, decode
from fedvl.data.sources import open_dataset
from fedvl.deployment import messages
from fedvl.errors import FedVLError
from fedvl.federation.journal import Journal
from fedvl.models.checkpoint import EMBEDDED_FOLDER, load_model
from fedvl.tensors import load


def torch_file():
    file = io.BytesIO()
    torch.save({"weight": Canary()}, file)
    return file.getvalue()


def numpy_file():
    file = io.BytesIO()
    np.save(file, np.array([Canary()], dtype=object), allow_pickle=True)
    return file.getvalue()


def numpy_archive():
    file = io.BytesIO()
    np.savez(file, weight=np.array([Canary()], dtype=object))
    return file.getvalue()


def zip_bomb():
    """Eight megabytes of nothing in eight kilobytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", bytes(2**23))
    assert len(file.getvalue()) < 2**14
    return file.getvalue()


HOSTILE = {
    "pickle": lambda: pickle.dumps(Canary()),
    "torch file": torch_file,
    "numpy file": numpy_file,
    "numpy archive": numpy_archive,
    "zip bomb": zip_bomb,
}


def as_model_file(content, folder):
    (folder / "model.safetensors").write_bytes(content)
    load_model(str(folder / "model.safetensors"))


def as_model_folder(content, folder):
    shutil.copytree(EMBEDDED_FOLDER / "fedvl-tiny", folder / "model")
    for path in (folder / "model").glob("*.safetensors"):
        path.unlink()
    (folder / "model" / "pytorch_model.bin").write_bytes(content)
    load_model(str(folder / "model"))


def as_dataset(content, folder):
    (folder / "set.parquet").write_bytes(content)
    open_dataset(str(folder / "set.parquet"))


def as_manifest(content, folder):
    (folder / "set.jsonl").write_bytes(content)
    open_dataset(str(folder / "set.jsonl"))


def as_image(content, folder):
    decode(content, "picture.png")


def as_tensors(content, folder):
    (folder / "tensors.safetensors").write_bytes(content)
    load(folder / "tensors.safetensors")


def as_message(content, folder):
    messages.unpack_tensors(content, 2**20)


def as_settings(content, folder):
    (folder / "config.toml").write_bytes(content)
    read_toml(folder / "config.toml")


def as_checkpoint(content, folder):
    Journal(folder).commit(1, {"shared/w": torch.ones(2)}, {"round": 1})
    for path in folder.iterdir():
        path.write_bytes(content)
    Journal(folder).latest()


PLACES = [as_model_file, as_model_folder, as_dataset, as_manifest, as_image]
PLACES += [as_tensors, as_message, as_settings, as_checkpoint]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_is_run_and_the_refusal_is_our_own(tmp_path, place, kind):
    with pytest.raises((FedVLError, BadImage)) as caught:
        place(HOSTILE[kind](), tmp_path)
    assert "\n" not in str(caught.value)
    assert not hasattr(fedvl, "canary")


def test_the_canary_sings_where_it_is_unpickled(monkeypatch):
    """Otherwise the test above could not fail."""
    monkeypatch.setattr(fedvl, "canary", False, raising=False)
    pickle.loads(pickle.dumps(Canary()))  # noqa: S301
    assert vars(fedvl)["canary"]
