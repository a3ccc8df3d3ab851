"""Reports of wrong answers: rows that a spreadsheet shows as text, pictures without headers, and limits."""

import csv

import pytest
from helpers.hostile import photo
from PIL import Image

from fedvl.errors import FedVLError
from fedvl.serve import reported
from fedvl.serve.reported import PICTURES, REPORT_COLUMNS, REPORTS_FILE, ReportBox, ReportedAnswer


def rows(folder):
    with open(folder / REPORTS_FILE, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_reports_are_rows_and_a_picture_is_stored_only_if_it_was_sent(tmp_path):
    box = ReportBox(tmp_path / "reports")
    told = ReportedAnswer(image="../../=x.dcm", answer="=1+1", share=0.5, truth="猫", remark="a\nb")
    box.add(told, None)
    assert not (tmp_path / "reports" / PICTURES).exists()
    marked = photo()
    marked.info["comment"] = "Name of a patient"
    box.add(told, marked)
    ReportBox(tmp_path / "reports").add(told, None)  # a service that starts again goes on with the file
    first, second, third = rows(tmp_path / "reports")
    assert tuple(first) == REPORT_COLUMNS
    assert (first["image"], first["answer"], first["truth"], first["picture"]) == ("../../=x.dcm", "'=1+1", "猫", "")
    assert first["remark"] == third["remark"] == "a\nb"
    (stored,) = (tmp_path / "reports" / PICTURES).iterdir()
    assert second["picture"] == f"{PICTURES}/{stored.name}"
    assert len(stored.stem) == 16  # random, and nobody's choice
    assert b"patient" not in stored.read_bytes()
    assert Image.open(stored).tobytes() == photo().tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reports"]


def test_a_full_folder_takes_no_more(tmp_path, monkeypatch):
    box, told = ReportBox(tmp_path), ReportedAnswer(image="a", answer="b", share=1)
    monkeypatch.setattr(reported, "MAX_PICTURES_BYTES", 10)
    with pytest.raises(FedVLError, match="reports is full; ask the operator"):
        box.add(told, photo())
    assert rows(tmp_path) == []
    assert list((tmp_path / PICTURES).iterdir()) == []
    monkeypatch.setattr(reported, "MAX_ROWS_BYTES", (tmp_path / REPORTS_FILE).stat().st_size)
    box.add(told, None)
    with pytest.raises(FedVLError, match="is full"):
        box.add(told, None)
    assert len(rows(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_and_a_link_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedVLError, match="name another folder with --reports"):
        ReportBox(tmp_path / "file")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / REPORTS_FILE).symlink_to(tmp_path / "file")
    with pytest.raises(FedVLError, match="is a link"):
        ReportBox(tmp_path / "linked")
