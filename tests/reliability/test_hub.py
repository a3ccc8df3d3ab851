"""A folder from a stranger names data of the hub: nobody is asked for them unless the user agrees."""

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest
from helpers.finished import finish, png
from helpers.forked import in_child
from huggingface_hub import constants

from fedvl.data.sources import open_dataset
from fedvl.errors import FedVLError
from fedvl.runs.folder import RunFolder

STRANGE = "hf:stranger/set"


@contextmanager
def hub() -> Iterator[tuple[str, list[object]]]:
    """Listen as the hub would; yield its address, and who came."""
    came: list[object] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def answer() -> None:
            with suppress(OSError):  # closed
                while True:
                    connection, address = listener.accept()
                    came.append(address)
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", came


@pytest.fixture
def sent(tmp_path):
    """A finished run that somebody sent, whose images are on the hub."""
    run = tmp_path / "run"
    settings = {"method": {"name": "linear"}, "data": {"clients": 3, "shots": 2}}
    finish(run, {**settings, "federation": {"rounds": 1, "threads": 1}})
    name_dataset(run, f"cifar10-mini+{STRANGE}")
    return run


def name_dataset(run, dataset):
    config = run / "config.toml"
    config.write_text(re.sub("^dataset = .*$", f'dataset = "{dataset}"', config.read_text(), flags=re.MULTILINE))


def test_no_command_asks_the_hub_for_the_images_of_a_folder_that_was_sent(sent, tmp_path):
    (tmp_path / "photo.png").write_bytes(png(0))
    with hub() as (address, came):

        def asked(*words):
            def prepare():
                os.environ["HF_ENDPOINT"] = constants.ENDPOINT = address
                constants.HF_HUB_OFFLINE = False
                constants.HF_HUB_CACHE = str(tmp_path / "hub")

            return in_child(tmp_path, *words, prepare=prepare)

        refusals = [asked("audit", "run"), asked("withdraw", "run", "0")]
        assert asked("predict", "run", "photo.png", "--json").code == 0  # which needs no images but the user's
        (sent / "result.json").unlink()
        refusals.append(asked("resume", "run"))
        for ended in refusals:
            assert ended.code == 2, ended.error
            assert f"would download the dataset {STRANGE} from the hub; if you want that" in ended.error
            assert ended.error.count("\n") == 1
        assert came == []
        assert "Cannot fetch the dataset" in asked("resume", "run", "--trust-method").error
        assert came  # or the test above could not fail


def test_images_of_the_hub_that_are_here_need_no_trust_and_links_among_them_lead_nowhere_else(
    sent, tmp_path, monkeypatch
):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "datasets--stranger--set"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    table = pyarrow.table({"image": [png(number) for number in range(4)], "label": ["cat", "dog"] * 2})
    for name in ("train", "test"):
        parquet.write_table(table, repository / "blobs" / name)
        (snapshot / f"{name}.parquet").symlink_to(f"../../blobs/{name}")
    assert open_dataset(STRANGE).class_names == ("cat", "dog")
    assert RunFolder(sent).experiment.data.dataset.endswith(STRANGE)
    parquet.write_table(table, tmp_path / "elsewhere")
    (snapshot / "val.parquet").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedVLError, match=r"val\.parquet is a link that leads out of"):
        open_dataset(STRANGE)
