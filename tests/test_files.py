"""Files: written whole or not at all, and read only if regular, not too large and not damaged."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fedvl.errors import FedVLError
from fedvl.files import (
    MAX_INTEGER,
    Content,
    Count,
    Hash,
    bounded_integer,
    file_sha256,
    fitting,
    no_link,
    parse_json,
    read_file,
    read_json,
    remove_parts,
    running,
    same_lengths,
    square,
    validated,
    write_whole,
)

ABSENT = 2**22 + 1  # above the largest process number of Linux


class Row(Content):
    number: Count
    name: str = ""


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "page.html"
    write_whole(path, b"old")
    write_whole(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_a_file_and_then_its_folder_are_synced_before_writing_ends(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    write_whole(tmp_path / "page.html", b"new")
    assert synced == [(tmp_path / "page.html").stat().st_ino, tmp_path.stat().st_ino]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    write_whole(path, b"old")

    def fail(number):
        raise OSError("full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_a_part_that_an_earlier_process_of_the_same_number_left_is_replaced(tmp_path):
    (tmp_path / f".page.html.{os.getpid()}.part").write_bytes(b"half")
    write_whole(tmp_path / "page.html", b"new")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"new"]


def test_files_that_are_written_whole_do_not_go_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("page.html", f".page.html.{os.getpid()}.part"):
        (tmp_path / name).symlink_to(victim)
    write_whole(tmp_path / "page.html", b"new")
    assert (victim.read_text(), (tmp_path / "page.html").read_text()) == ("precious", "new")
    assert not (tmp_path / "page.html").is_symlink()


def test_parts_of_processes_that_ended_are_removed(tmp_path):
    kept = [f".a.{os.getpid()}.part", ".mine.part", "a.12.part", f".a.{ABSENT}.part.old"]
    for name in [*kept, f".a.{ABSENT}.part", f".b.json.{ABSENT}.part"]:
        (tmp_path / name).touch()
    (tmp_path / f".folder.{ABSENT}.part").mkdir()
    remove_parts(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([*kept, f".folder.{ABSENT}.part"])


@pytest.mark.parametrize(
    "error, expected", [(None, True), (ProcessLookupError, False), (OverflowError, False), (PermissionError, True)]
)
def test_a_process_runs_unless_the_system_knows_none_of_its_number(error, expected, monkeypatch):
    asked = []

    def kill(process, signal):
        asked.append((process, signal))
        if error:
            raise error

    monkeypatch.setattr(os, "kill", kill)
    assert running(77) is expected
    assert asked == [(77, 0)], "signal 0 asks and does nothing"


def test_a_link_is_refused_and_a_path_without_one_is_returned(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    assert no_link(tmp_path / "absent") == tmp_path / "absent"
    with pytest.raises(FedVLError, match="link is a link, which a run folder does not have; remove it"):
        no_link(tmp_path / "link")


def test_a_file_of_the_most_bytes_is_read_and_one_more_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(FedVLError, match="has 5 bytes, more than the 4 that FedVL reads"):
        read_file(tmp_path / "file", 4)


def test_a_folder_and_a_pipe_are_refused_before_they_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(FedVLError, match="is a folder, pipe or device where a file is expected"):
            read_file(path, 100)


def test_a_hash_is_that_of_hashlib(tmp_path):
    (tmp_path / "file").write_bytes(b"abc" * 100_000)
    assert file_sha256(tmp_path / "file") == hashlib.sha256(b"abc" * 100_000).hexdigest()


def test_json_is_parsed_and_what_cannot_be_is_a_value_error():
    assert parse_json(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 1_000_000)
    with pytest.raises(ValueError):
        parse_json("{")


def test_an_integer_of_more_than_19_digits_is_read_as_a_float():
    longest = "9" * MAX_INTEGER
    assert parse_json(longest) == int(longest)
    assert isinstance(parse_json(longest), int)
    assert isinstance(bounded_integer("9" * (MAX_INTEGER + 1)), float)
    assert parse_json("1" + "0" * 400) == float("inf")


def test_a_json_file_is_read_and_one_that_is_not_there_is_none(tmp_path):
    path = tmp_path / "a.json"
    assert read_json(path) is None
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    with pytest.raises(FedVLError, match="has 8 bytes, more than the 7"):
        read_json(path, 7)
    path.write_text("{")
    with pytest.raises(FedVLError, match=r"a\.json cannot be read \(.*\): run the experiment again"):
        read_json(path)


def test_lists_of_different_lengths_are_refused_and_none_is_left_out():
    same_lengths(names=["a", "b"], values=[1, 2], absent=None)
    with pytest.raises(ValueError, match=r"^names and values have different lengths$"):
        same_lengths(names=["a", "b"], values=[1], absent=None)


def test_every_row_of_a_square_has_its_width():
    square(None, 3, "counts")
    square([[1, 2], [3, 4]], 2, "counts")
    for rows in ([[1, 2], [3]], [[1, 2, 3]]):
        with pytest.raises(ValueError, match=r"^a row of counts has not 2 values$"):
            square(rows, 2, "counts")


def test_content_has_the_types_of_its_fields_and_may_have_others(tmp_path):
    path = tmp_path / "row.json"
    good = {"number": 0, "unknown": [1]}
    assert fitting(Row, good)
    assert validated(Row, good, path).to_dict() == good
    wrong: list[Any] = [{"number": -1}, {"number": "1"}, {"number": 2**63}, {"number": 1.0}, {}, []]
    for bad in wrong:
        assert fitting(Row, bad) is None
        with pytest.raises(FedVLError, match="is not as FedVL writes it"):
            validated(Row, bad, path)


def test_what_is_wrong_with_a_file_is_named_and_shortened(tmp_path):
    with pytest.raises(FedVLError) as error:
        validated(Row, {"number": 1, "name": 5}, tmp_path / "row.json")
    assert str(error.value).endswith(
        "row.json is not as FedVL writes it (its 'name' is 5: input should be a valid string); get a whole copy of it."
    )
    with pytest.raises(FedVLError) as error:
        validated(Row, {"number": "x" * 10_000}, tmp_path / "row.json")
    assert len(str(error.value)) < 300 + len(str(tmp_path))
    with pytest.raises(FedVLError, match="what it holds: input should be a valid dictionary"):
        validated(Row, [], tmp_path / "row.json")


@pytest.mark.parametrize(
    "value, good", [("a" * 64, True), ("a" * 63, False), ("a" * 65, False), ("A" * 64, False), ("g" * 64, False)]
)
def test_a_hash_is_64_hexadecimal_digits(value, good):
    class Hashed(Content):
        digest: Hash

    assert (fitting(Hashed, {"digest": value}) is not None) is good


def test_a_validated_content_is_written_with_the_keys_that_were_set():
    row = validated(Row, {"name": "one", "number": 3, "further": [1]}, Path("row.json"))
    assert (row.number, row.name) == (3, "one")
    assert row.to_json() == '{"number": 3, "name": "one", "further": [1]}'
    assert Row(number=2).to_json() == '{"number": 2}'


@pytest.mark.parametrize(("digits", "number"), [("9" * 19, 10**19 - 1), ("-" + "9" * 18, 1 - 10**18), ("9" * 20, 1e20)])
def test_an_integer_of_more_than_nineteen_characters_is_read_as_a_float(digits, number):
    found = parse_json(digits.encode())
    assert found == number
    assert type(found) is type(number)
