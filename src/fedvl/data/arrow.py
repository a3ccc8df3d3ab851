"""Read tables with images: parquet files, and folders that Hugging Face's `datasets` saved."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedvl.data.assemble import SPLIT_NAMES, UNIT_COLUMNS, Table
from fedvl.data.stores import ArrowStore, JoinedStore, ParquetStore
from fedvl.errors import FedVLError
from fedvl.files import MAX_JSON, parse_json, read_file, regular
from fedvl.version import install_command

MAX_FILE = 2**40  # bytes of a table
MAX_TABLE_CHARACTERS = 2**31  # characters of a table's labels, splits and texts
MAX_GROUP = 2**31  # bytes of the images of a row group
LEAST_ROW = 16  # bytes of a file for each of its rows: no image is smaller
ROWS_AT_ONCE = 65_536  # rows of labels and texts read at once
MAX_TABLE_FILES = 10_000


class Columns(NamedTuple):
    """What a table has: names of its columns, and the class names of numeric labels."""

    image: str
    label: str
    others: list[str]  # split, text, domain and units, if there are any
    classes: dict[Any, str]
    content: str  # the image's bytes: its column, or the part "bytes" of a column of `datasets`


def read_parquet(path: Path) -> Table:
    """Read the columns image (bytes) and label, and optionally split, text and domain."""
    parquet = _pyarrow("pyarrow.parquet")

    def read() -> tuple[Any, Columns, dict[str, list[Any]]]:
        size = regular(path, MAX_FILE).stat().st_size
        file = parquet.ParquetFile(path)
        columns = _columns_of(file.schema_arrow, path)
        _check_rows(sum(group.num_rows for group in _groups(file)), size, path)
        names = [columns.label, *columns.others]
        # as written: a value that a million rows repeat is read once
        file = parquet.ParquetFile(path, metadata=file.metadata, read_dictionary=[columns.content, *names])
        return file, columns, _values(file.iter_batches(batch_size=ROWS_AT_ONCE, columns=names), names, path)

    file, columns, values = _read(read, path, "parquet")
    if any(group.total_byte_size > MAX_GROUP for group in _groups(file)):
        raise FedVLError(f"A row group of {path} has more than {MAX_GROUP:,} bytes; write it with smaller row groups.")
    sizes = [group.num_rows for group in _groups(file)]
    store = ParquetStore(path, file, np.cumsum([0, *sizes[:-1]], dtype=np.int64), columns.content)
    return _table(path, store, columns, values)


def _groups(file: Any) -> list[Any]:
    return [file.metadata.row_group(number) for number in range(file.num_row_groups)]


def _check_rows(rows: int, size: int, path: Path) -> None:
    """Refuse more rows than there can be images: a small file can claim any number of them."""
    if rows * LEAST_ROW > size:
        raise FedVLError(
            f"{path} claims {rows:,} rows in {size:,} bytes, which hold no such number of images; get the file again."
        )


def read_arrow(path: Path) -> Table:
    """Read an Arrow stream with the same columns; its images stay on disk until they are used."""
    pyarrow, ipc = _pyarrow("pyarrow"), _pyarrow("pyarrow.ipc")

    def read() -> tuple[Any, Columns, dict[str, list[Any]]]:
        size = regular(path, MAX_FILE).stat().st_size
        with ipc.open_stream(pyarrow.memory_map(str(path))) as stream:
            columns = _columns_of(stream.schema, path)
            batches, rows = [], 0
            for batch in stream:
                rows += batch.num_rows
                _check_rows(rows, size, path)
                batch.validate(full=True)  # offsets of a damaged file lead anywhere in memory
                if batch.nbytes > 2 * size:  # `datasets` does not compress
                    raise FedVLError(f"{path} is compressed; save it again with save_to_disk.")
                batches.append(batch)
            table = pyarrow.Table.from_batches(batches, stream.schema)
        names = [columns.label, *columns.others]
        return table.column(columns.image), columns, _values(table.select(names).to_batches(ROWS_AT_ONCE), names, path)

    images, columns, values = _read(read, path, "Arrow")
    return _table(path, ArrowStore(path, images), columns, values)


def read_saved(folder: Path) -> Table:
    """Read what `save_to_disk` of a Dataset or a DatasetDict wrote."""
    splits = _described(folder / "dataset_dict.json", "splits")
    if splits is None:
        return joined_tables(folder, [read_arrow(path) for path in _saved_files(folder)])
    tables = []
    for split in splits:
        own = joined_tables(folder, [read_arrow(path) for path in _saved_files(folder / _plain(split, folder))])
        own.splits = [split] * len(own.labels)
        tables.append(own)
    return joined_tables(folder, tables)


def _saved_files(folder: Path) -> list[Path]:
    listed = _described(folder / "state.json", "_data_files")
    if listed is None:
        raise FedVLError(f"{folder} has no state.json, which save_to_disk writes; get the whole folder again.")
    names = [_plain(file.get("filename") if isinstance(file, dict) else None, folder) for file in listed]
    if not 0 < len(names) <= MAX_TABLE_FILES:
        raise FedVLError(f"{folder / 'state.json'} lists no files, or too many; get the folder again.")
    return [folder / name for name in names]


def _plain(name: Any, folder: Path) -> str:
    """Return the name of a file or folder in a folder; refuse one that leads out of it."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise FedVLError(
            f"{folder} names a part of it {str(name)[:100]!r}, which is not a plain file name; get the folder again."
        )
    if (folder / name).is_symlink():
        raise FedVLError(f"{folder / name} is a link; put a copy there.")
    return name


def _described(path: Path, key: str) -> list[Any] | None:
    """Return a list of a JSON file; None if the file does not exist."""
    try:
        found = parse_json(read_file(path, MAX_JSON))[key]
        if isinstance(found, list):
            return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise FedVLError(f"{path} is not what save_to_disk writes; get the folder again.")


def tables_in(folder: Path) -> Iterator[Path]:
    """Yield the parquet files of a folder and of the folders in it, but for hidden ones."""
    for pattern in ("*.parquet", "*/*.parquet", "*/*/*.parquet"):
        for path in folder.glob(pattern):
            if not any(part.startswith(".") for part in path.relative_to(folder).parts):
                yield path


def read_tables(folder: Path) -> Table:
    """Read a folder of parquet files as the hub has them; names of files or folders are splits."""
    paths = sorted(tables_in(folder))
    if len(paths) > MAX_TABLE_FILES:
        raise FedVLError(
            f"{folder} has {len(paths):,} parquet files, more than {MAX_TABLE_FILES:,}; use fewer, larger ones."
        )
    splits = [_split_of(path) for path in paths]
    homes = {
        path.parent.parent if split == path.parent.name else path.parent
        for path, split in zip(paths, splits, strict=True)
    }
    if len(homes) > 1:
        found = ", ".join(sorted(home.relative_to(folder).as_posix() for home in homes))
        raise FedVLError(
            f"{folder} has several tables ({found[:200]}); give the folder of one, or hf:OWNER/NAME/CONFIGURATION."
        )
    tables = [read_parquet(path) for path in paths]
    for table, split in zip(tables, splits, strict=True):
        if split:
            table.splits = [split] * len(table.labels)
    return joined_tables(folder, tables)


def _split_of(path: Path) -> str:
    """Return the split of SPLIT-00000-of-00001.parquet or SPLIT/0000.parquet, or nothing."""
    known = SPLIT_NAMES.keys() - {"", "all"}
    return next((name for name in (path.stem.split("-")[0], path.parent.name) if name.casefold() in known), "")


def joined_tables(where: Path, tables: Sequence[Table]) -> Table:
    """Put tables below one another."""
    starts = np.cumsum([0, *(len(table.labels) for table in tables[:-1])], dtype=np.int64)

    def column(parts: Sequence[list[str] | None]) -> list[str] | None:
        known = [part or [""] * len(table.labels) for part, table in zip(parts, tables, strict=True)]
        return [value for own in known for value in own] if any(parts) else None

    return Table(
        str(where),
        JoinedStore([table.store for table in tables], starts),
        [label for table in tables for label in table.labels],
        [split for table in tables for split in table.splits],
        column([table.texts for table in tables]),
        column([table.domains for table in tables]),
        units={name: found for name in UNIT_COLUMNS if (found := column([table.units.get(name) for table in tables]))},
    )


def _pyarrow(module: str) -> Any:
    from importlib import import_module

    try:
        import_module("pyarrow")
        return import_module(module)
    except ImportError as error:
        raise FedVLError(f"Reading parquet needs pyarrow: {install_command('parquet')}.") from error


def _read(read: Callable[[], tuple[Any, Columns, dict[str, list[Any]]]], path: Path, kind: str) -> Any:
    try:
        return read()
    except (OSError, _pyarrow("pyarrow").ArrowException, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FedVLError(f"{path} cannot be read as {kind} ({reason}).") from error


def _columns_of(schema: Any, path: Path) -> Columns:
    """Find the columns by the types that Hugging Face datasets store in the schema, or by name."""
    features = _features(schema.metadata)

    def found(kind: str, names: Sequence[str]) -> str | None:
        typed = [
            name for name, feature in features.items() if isinstance(feature, dict) and feature.get("_type") == kind
        ]
        return next((name for name in (*names, *typed) if name in schema.names), None)

    image, label = found("Image", ("image", "img")), found("ClassLabel", ("label",))
    if image is None or label is None:
        missing = " and ".join(name for name, column in (("image", image), ("label", label)) if column is None)
        raise FedVLError(f"{path} has no column {missing}; expected image (bytes), label, split, text.")
    kind = str(schema.field(image).type)
    if not kind.startswith(("binary", "large_binary", "struct")):
        raise FedVLError(f"The column {image} of {path} does not hold bytes; store the bytes of the image files in it.")
    names = features.get(label, {}).get("names") if isinstance(features.get(label), dict) else None
    classes = {-1: "", **dict(enumerate(map(str, names)))} if isinstance(names, list) else {}  # -1: no label
    others = [name for name in ("split", "text", "domain", *UNIT_COLUMNS) if name in schema.names]
    for name in (label, *others):
        _check_plain(schema.field(name), path)
    return Columns(image, label, others, classes, f"{image}.bytes" if kind.startswith("struct") else image)


def _check_plain(field: Any, path: Path) -> None:
    """Refuse labels and texts of types whose values can be larger than the file."""
    types = _pyarrow("pyarrow.types")
    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    plain = ("string", "large_string", "integer", "floating", "boolean", "null")
    if not any(getattr(types, f"is_{name}")(kind) for name in plain):
        raise FedVLError(f"The column {field.name} of {path} holds {str(kind)[:100]}; store texts or numbers in it.")


def _features(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    try:
        return dict(json.loads((metadata or {})[b"huggingface"])["info"]["features"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}


def _values(batches: Iterator[Any], names: list[str], path: Path) -> dict[str, list[Any]]:
    """Read columns piece by piece: a small file can claim endless rows of the same text."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    size = 0
    for batch in batches:
        for name in names:
            values = _decoded(batch.column(name))
            size += sum(len(value) for value in values if isinstance(value, str))
            found[name] += values
        if size > MAX_TABLE_CHARACTERS:
            raise FedVLError(
                f"The labels and texts of {path} have more than {MAX_TABLE_CHARACTERS:,} characters; use a smaller file."
            )
    return found


def _decoded(column: Any) -> list[Any]:
    """Return the values of a column; rows of one value share it."""
    if not hasattr(column, "dictionary"):
        return list(column.to_pylist())
    values = column.dictionary.to_pylist()
    return [None if index is None else values[index] for index in column.indices.to_pylist()]


def _table(path: Path, store: ParquetStore | ArrowStore, columns: Columns, values: dict[str, list[Any]]) -> Table:
    labels = ["" if value is None else columns.classes.get(value, str(value)) for value in values[columns.label]]
    splits = [str(value or "") for value in values.get("split", [""] * len(labels))]
    texts, domains = (
        [str(value or "") for value in values[name]] if name in values else None for name in ("text", "domain")
    )
    units = {
        name: ["" if value is None else str(value) for value in values[name]] for name in UNIT_COLUMNS if name in values
    }
    if not labels:
        raise FedVLError(f"{path} has no rows.")
    return Table(str(path), store, labels, splits, texts, domains, units=units)
