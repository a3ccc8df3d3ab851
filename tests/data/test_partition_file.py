"""A partition from a file: by number and by name, with what a user can get wrong told in one sentence."""

import json

import numpy as np
import pytest

import fedvl
from fedvl.config import DataConfig
from fedvl.data.partition_file import TrainingImages, partition_from_file, read_partition
from fedvl.data.protocols import Labels, closed, personal
from fedvl.errors import FedVLError

LABELS = np.array([0, 1, 0, 1, 0, 1])
KEPT = np.array([0, 1, 2, 4, 5, 7])  # rows 3 and 6 of the split cannot be read
IMAGES = TrainingImages(KEPT, "scans/{}.png".format)


def assigned(path, labels=LABELS, chosen=None, clients=None):
    chosen = np.arange(len(labels)) if chosen is None else chosen
    clients = len(read_partition(path)) if clients is None else clients
    return partition_from_file(str(path), IMAGES, labels, chosen, clients, seed=0)


def written(folder, text, name="mine.csv"):
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.json", "[[7, 0], [2]]"),
        ("mine.json", '[["scans/7.png", "scans/0.png"], ["scans/2.png"]]'),
        ("mine.csv", "client,row\n0,7\n1,2\n0,0\n"),
        ("mine.csv", "\ufeffRow;Client\r\n7;0\r\n2;1\r\n0;0\r\n"),
        ("MINE.CSV", "file,client,label\nscans/0.png,0,x\nscans/7.png,0,x\nscans/2.png,1,x\n"),
    ],
)
def test_rows_are_those_of_the_split_by_number_or_by_name(tmp_path, name, text):
    found = assigned(written(tmp_path, text, name))
    assert [own.tolist() for own in found.clients] == [[0, 5], [2]]
    assert found.counts.tolist() == [[1, 1], [1, 0]]  # labels 0 and 1 of client 0, 0 of client 1
    assert found.note == f"{name}: 3 of 6 training images were assigned to 2 clients."


def test_rows_written_for_python_are_read_again(tmp_path):
    (tmp_path / "rows.json").write_text("[[5, 7], [0]]")
    assert [own.tolist() for own in assigned(tmp_path / "rows.json").clients] == [[4, 5], [0]]


def test_only_chosen_images_and_known_labels_count_and_clients_may_be_empty(tmp_path):
    path = written(tmp_path, "client,row\n2,0\n2,1\n0,2\n")
    found = assigned(path, labels=np.array([0, -1, 0, 1, 0, 1]), chosen=np.array([0, 1, 5]))
    assert [own.tolist() for own in found.clients] == [[], [], [0, 1]]
    assert found.counts.tolist() == [[0, 0], [0, 0], [1, 0]]
    assert found.note.endswith("2 of 3 training images were assigned to 3 clients, and 2 clients hold no samples.")


def test_protocols_take_a_file_whatever_its_name(tmp_path):
    data = DataConfig(partition=str(written(tmp_path, "client,row\n0,0\n0,2\n1,1\n1,5\n", "domains.csv")), clients=2)
    labels = Labels(LABELS, np.array([0, 1, 0, 1]), 2, images=IMAGES)
    for protocol in (closed, personal):
        assignment = protocol(labels, data, 0)
        assert [own.tolist() for own in assignment.clients] == [[0, 2], [1, 4]]
    # client 0 holds two of class 0 and client 1 one of class 1 and one of class 0
    counts = [np.bincount(np.array([0, 1, 0, 1])[part], minlength=2).tolist() for part in assignment.parts]
    assert (counts[0][1], counts[1][1]) == (0, 2)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("x.json", "[[0], [1", "is not JSON"),
        ("x.json", '{"0": [1]}', "is not a list of lists"),
        ("x.json", "[]", "is not a list of lists"),
        ("x.json", "[[0], [1.5]]", "has 1.5, which is not a row number"),
        ("x.json", "[[0], [true]]", "has True, which is not a row number"),
        ("x.json", '[[0], ["a"]]', "has 'a', which is not a row number"),
        ("x.csv", "", "has the columns none"),
        ("x.csv", "client,image\n0,1\n", "has the columns client, image"),
        ("x.csv", "client,row\n", "assigns no image"),
        ("x.csv", "client,row\n-1,1\n", "Line 2 of the partition file"),
        ("x.csv", "client,row\none,1\n", "has the client 'one'; number clients from 0"),
        ("x.csv", "client,row\n99999999999,1\n", "has the client '99999999999'"),
        ("x.csv", "client,row\n0,first\n", "has the row 'first'; number rows from 0"),
        ("x.csv", 'client,row\n0,"1\n', "is not CSV"),
        ("x.csv", "client,row\n0,1\n0,1\n", "gives 1 to client 0 twice"),
        ("x.csv", "client,row\n0,1\n1,1\n", "gives 1 to clients 0 and 1"),
        ("x.csv", "client,row\n0,3\n", "gives client 0 the image 3, which cannot be read; remove it"),
        ("x.csv", "client,row\n0,8\n", "gives client 0 the image 8; rows go from 0 to 7"),
        ("x.csv", "client,file\n0,scans/9.png\n", "'scans/9.png', which is not among the training images"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(tmp_path, name, text, told):
    with pytest.raises(FedVLError) as error:
        assigned(written(tmp_path, text, name))
    assert told in str(error.value)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    for path, told in ((tmp_path / "absent.csv", "There is no partition file"), (tmp_path, "where a file is expected")):
        with pytest.raises(FedVLError, match=told):
            read_partition(path)
    (tmp_path / "latin.csv").write_bytes(b"client,file\n0,caf\xe9.png\n")
    with pytest.raises(FedVLError, match="it is not in UTF-8"):
        read_partition(tmp_path / "latin.csv")


def test_a_run_has_the_clients_and_the_rows_of_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [list(range(30)), list(range(40, 50)), [60]]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    result = fedvl.run(partition="rows.json", rounds=1, quiet=True, out="run", **{"data.test_shots": 2}).figures
    assert result.clients == 3
    assert [sum(own) for own in result.partition_counts] == [30, 10, 1]
    assert result.partition_note.startswith("rows.json: 41 of ")
    with pytest.raises(FedVLError, match=r"has 3 clients, and data.clients is 5; leave --clients out"):
        fedvl.run(partition="rows.json", clients=5, quiet=True)
    # a changed file is another experiment: its rounds are not gone on with
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "rows.json").write_text(json.dumps(rows[::-1]))
    with pytest.raises(FedVLError, match="of another experiment"):
        fedvl.resume("run", quiet=True)
