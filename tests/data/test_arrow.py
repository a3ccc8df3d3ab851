"""Tables of Hugging Face: folders that `datasets` saved, folders of parquet files, and names of the hub."""

import io
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedvl.data import arrow
from fedvl.data.sources import open_dataset, read_path
from fedvl.errors import FedVLError

NAMES = ["cat", "dog"]
FEATURES = {"img": {"_type": "Image"}, "fine_label": {"names": NAMES, "_type": "ClassLabel"}}
METADATA = {b"huggingface": json.dumps({"info": {"features": FEATURES}}).encode()}


def png(shade: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (4, 4), (shade, 0, 0)).save(data, "PNG")
    return data.getvalue()


def table_of(shades: list[int], labels: list[int]) -> pa.Table:
    """As `datasets` has it: images as bytes and path, labels as numbers whose names are in the schema."""
    images = [{"bytes": png(shade), "path": f"{shade}.png"} for shade in shades]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    arrays = [pa.array(images, kind), pa.array(labels, pa.int64())]
    return pa.table(arrays, schema=pa.schema([("img", kind), ("fine_label", pa.int64())], METADATA))


def write_saved(folder: Path, *tables: pa.Table, chunk: int = 2) -> None:
    """What `Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"data-{number:05}-of-{len(tables):05}.arrow" for number in range(len(tables))]
    for name, table in zip(files, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=chunk)
    (folder / "dataset_info.json").write_text(json.dumps({"features": FEATURES}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))


def shades_of(dataset: Any, split: str) -> list[int]:
    part = dataset.splits[split]
    return [np.asarray(part.read(row))[0, 0, 0] for row in range(len(part))]


def assert_two_splits(dataset: Any) -> None:
    assert dataset.class_names == ("cat", "dog")
    assert shades_of(dataset, "train") == [10, 20, 30, 40, 50]
    assert dataset.splits["train"].labels.tolist() == [0, 1, 0, 1, -1]  # -1 is "no label" there too
    assert shades_of(dataset, "test") == [60, 70]
    assert dataset.splits["test"].labels.tolist() == [1, 0]


TRAIN = ([10, 20, 30, 40, 50], [0, 1, 0, 1, -1])
TEST = ([60, 70], [1, 0])


def test_a_saved_dictionary_of_splits(tmp_path: Path) -> None:
    """In two files of several batches for training, and one for the test."""
    parts = [table_of(TRAIN[0][:3], TRAIN[1][:3]), table_of(TRAIN[0][3:], TRAIN[1][3:])]
    write_saved(tmp_path / "set" / "train", *parts)
    write_saved(tmp_path / "set" / "test", table_of(*TEST))
    (tmp_path / "set" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    dataset = open_dataset(str(tmp_path / "set"))
    assert_two_splits(dataset)
    assert dataset.splits["train"].describe(4) == "data-00001-of-00002.arrow row 1"


def test_a_saved_dataset_is_split_by_content(tmp_path: Path) -> None:
    shades = list(range(0, 200, 5))
    write_saved(tmp_path / "set", table_of(shades, [row % 2 for row in range(len(shades))]))
    dataset = open_dataset(str(tmp_path / "set"))
    assert sorted(shades_of(dataset, "train") + shades_of(dataset, "test")) == shades
    with pytest.raises(FedVLError, match="no class 'fox'"):
        open_dataset(str(tmp_path / "set"), None, ("cat", "fox"))


def write_parquet(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)


def write_hub(folder: Path) -> None:
    write_parquet(folder / "data" / "train-00000-of-00002.parquet", table_of(TRAIN[0][:2], TRAIN[1][:2]))
    write_parquet(folder / "data" / "train-00001-of-00002.parquet", table_of(TRAIN[0][2:], TRAIN[1][2:]))
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", table_of(*TEST))


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    write_hub(tmp_path / "set")
    assert_two_splits(open_dataset(str(tmp_path / "set")))
    write_parquet(tmp_path / "other" / "train" / "0000.parquet", table_of(*TRAIN))
    write_parquet(tmp_path / "other" / "test" / "0000.parquet", table_of(*TEST))
    assert_two_splits(open_dataset(str(tmp_path / "other")))


def test_texts_and_domains_of_some_files_are_kept(tmp_path: Path) -> None:
    told = table_of(*TEST).append_column("text", [["a", None]]).append_column("domain", [["north", "south"]])
    told = told.append_column("patient", [[7, None]])
    write_parquet(tmp_path / "train.parquet", table_of(*TRAIN))
    write_parquet(tmp_path / "test.parquet", told)
    dataset = open_dataset(str(tmp_path))
    assert (dataset.splits["test"].texts, dataset.splits["test"].domains) == (("a", ""), ("north", "south"))
    assert (dataset.splits["train"].texts, dataset.splits["train"].domains) == (("",) * 5, ("",) * 5)
    assert dataset.splits["test"].units == {"patient": ("7", "")}
    assert dataset.splits["train"].units == {"patient": ("",) * 5}


def test_several_tables_are_refused(tmp_path: Path) -> None:
    write_hub(tmp_path / "set" / "large")
    write_parquet(tmp_path / "set" / "small" / "train-0.parquet", table_of(*TRAIN))
    with pytest.raises(FedVLError, match=r"several tables \(large/data, small\)"):
        open_dataset(str(tmp_path / "set"))


def test_a_name_of_the_hub_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, **given: Any) -> str:
        asked.append((name, given))
        if given.get("local_files_only") and not tmp_path.joinpath("data").exists():
            raise FileNotFoundError(name)
        write_hub(tmp_path)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_two_splits(open_dataset("hf:someone/pets"))
    wanted = {"repo_type": "dataset", "allow_patterns": ["*.parquet"]}
    assert asked == [("someone/pets", {**wanted, "local_files_only": True}), ("someone/pets", wanted)]
    assert open_dataset("hf:someone/pets").name == "pets"
    assert len(asked) == 3  # found without asking the hub
    assert_two_splits(open_dataset("hf:someone/pets/data"))
    assert asked[-1][1]["allow_patterns"] == ["data/*.parquet"]


@pytest.mark.parametrize("name", ["hf:", "hf:pets", "hf:../pets", "hf:someone/pets/../../x", "hf:a/b/c/d", "hf:a/b\0"])
def test_what_is_no_name_of_the_hub_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(FedVLError, match="not a name of the hub"):
        open_dataset(name)


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **given: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FedVLError, match=r"Cannot fetch the dataset 'someone/pets' \(no network\)"):
        open_dataset("hf:someone/pets")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **given: str(tmp_path))
    with pytest.raises(FedVLError, match="no parquet files"):
        open_dataset("hf:someone/pets")


def damaged(folder: Path, case: str) -> None:
    arrow, state = folder / "data-00000-of-00001.arrow", folder / "state.json"
    if case == "a file elsewhere":
        state.write_text(json.dumps({"_data_files": [{"filename": "../secret.arrow"}]}))
    elif case == "a link":
        arrow.rename(folder.parent / "elsewhere.arrow")
        arrow.symlink_to(folder.parent / "elsewhere.arrow")
    elif case == "no files":
        state.write_text(json.dumps({"_data_files": []}))
    elif case == "no list":
        state.write_text("{")
    elif case == "a split elsewhere":
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": [".."]}))
    elif case == "cut off":
        arrow.write_bytes(arrow.read_bytes()[:300])
    elif case == "no Arrow":
        arrow.write_bytes(b"x" * 1000)
    elif case == "compressed":
        table = pa.table({"img": pa.array([bytes(2**20)] * 4), "fine_label": [0, 1, 0, 1]}).replace_schema_metadata(
            METADATA
        )
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.OSFile(str(arrow), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as stream:
            stream.write_table(table)
    elif case == "offsets that lead out of the file":
        first, second = len(png(10)), len(png(20))
        offsets, wrong = (
            np.array(ends, np.int32).tobytes() for ends in ([0, first, first + second], [0, 2**30, 2**30 + 5])
        )
        content = arrow.read_bytes()
        assert offsets in content
        arrow.write_bytes(content.replace(offsets, wrong))


@pytest.mark.parametrize(
    "case, reason",
    {
        "a file elsewhere": "not a plain file name",
        "a link": "is a link",
        "no files": "lists no files",
        "no list": "not what save_to_disk writes",
        "a split elsewhere": "not a plain file name",
        "cut off": "cannot be read as Arrow",
        "no Arrow": "cannot be read as Arrow",
        "compressed": "is compressed",
        "offsets that lead out of the file": "cannot be read as Arrow",
    }.items(),
)
def test_a_strangers_folder_ends_in_one_sentence(tmp_path: Path, case: str, reason: str) -> None:
    write_saved(tmp_path / "set", table_of(*TRAIN))
    damaged(tmp_path / "set", case)
    with pytest.raises(FedVLError, match=reason) as caught:
        open_dataset(str(tmp_path / "set"))
    assert "\n" not in str(caught.value)


# --- a table from a stranger


def repeated(value: Any, count: int) -> pa.Array:
    """The same value so many times, which a table holds once."""
    return pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), [value])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_few_bytes_cannot_claim_millions_of_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 2_000_000 if kind == "parquet" else 20_000
    table = pa.table({"image": pa.nulls(rows, "binary"), "label": repeated("cat", rows)})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "set.parquet")
        assert (tmp_path / "set.parquet").stat().st_size < 20_000
    else:
        write_saved(tmp_path, table, chunk=rows)
    monkeypatch.setattr(arrow, "_values", lambda *given: pytest.fail("a row is read"))
    with pytest.raises(FedVLError, match=r"claims .* rows in [\d,]+ bytes, which hold no such number of images"):
        read_path(tmp_path)


@pytest.mark.parametrize("column", ["label", "text"])
def test_a_few_bytes_cannot_claim_endless_texts(column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they unpacked: rows share what the table holds once."""
    rows = 1000
    images = [np.random.default_rng(row).bytes(20) for row in range(rows)]
    columns = {"image": images, "label": pa.array(["cat"] * rows), column: repeated("x" * 1000, rows).cast("string")}
    pq.write_table(pa.table(columns), tmp_path / "set.parquet")
    table = read_path(tmp_path / "set.parquet")
    values: Any = table.labels if column == "label" else table.texts
    assert len({id(value) for value in values}) == 1
    monkeypatch.setattr(arrow, "MAX_TABLE_CHARACTERS", 10**6 - 1)
    with pytest.raises(FedVLError, match=r"labels and texts of .* have more than"):
        read_path(tmp_path / "set.parquet")


@pytest.mark.parametrize("nested", [False, True])
def test_an_image_that_many_rows_repeat_is_in_memory_once(nested: bool, tmp_path: Path) -> None:
    rows, image = 300, np.random.default_rng(0).bytes(2**20)
    images = repeated(image, rows).cast("binary")
    column = pa.StructArray.from_arrays([images, pa.array(["x" * 1000] * rows)], ["bytes", "path"])
    table = pa.table({"image": column if nested else images, "label": ["cat"] * rows})
    del images, column
    pq.write_table(table, tmp_path / "set.parquet", dictionary_pagesize_limit=2**22)
    del table
    store = read_path(tmp_path / "set.parquet").store
    before = pa.total_allocated_bytes()
    assert store.content(rows - 1).startswith(b"1048576 ")
    assert pa.total_allocated_bytes() - before < 2**24


@pytest.mark.parametrize("values", [[["a"]], [b"a"], pa.array(["a"], pa.string_view()), [{"a": 1}]])
def test_labels_are_texts_or_numbers(values: Any, tmp_path: Path) -> None:
    write_saved(tmp_path, pa.table({"image": [png(1)], "label": values}))
    with pytest.raises(FedVLError, match=r"The column label of .* store texts or numbers in it"):
        read_path(tmp_path)
