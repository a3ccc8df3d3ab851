"""A run folder as version 0.1 wrote it opens in report, predict and resume."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.finished import png
from helpers.runs import OPENER

from fedvl.data.images import BadImage
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.report.page import write_report
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.serve.model import TrainedModel

WRITTEN = Path(__file__).with_name("version_0.1")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WRITTEN, tmp_path / "old"))


def test_it_has_a_report_and_answers(old: Path) -> None:
    page = write_report(old).read_text()
    assert "linear" in page
    assert "60.00" in page
    model = TrainedModel(RunFolder(old))
    (encoded,) = model.encode([model.read(png(0))])
    assert not isinstance(encoded, BadImage)
    (reply,) = model.user().ask([encoded], 1)
    assert reply.ranked[0][0] in (RunFolder(old).result.class_names)


def test_it_is_resumed_from_its_journal_to_the_same_bits(old: Path) -> None:
    before = RunFolder(old).result
    (old / "result.json").unlink()
    for path in (old / "journal").glob("000003.*"):
        path.unlink()
    again = complete(RunFolder(old), Silent(), OPENER)
    assert all(getattr(again, key) == getattr(before, key) for key in ("accuracy", "per_round", "state_sha256"))
    assert len(RunFolder(old).rounds) == before.rounds == 3


def test_a_result_of_another_form_is_refused_with_a_reason(old: Path) -> None:
    content = json.loads((old / "result.json").read_bytes())
    (old / "result.json").write_text(json.dumps({**content, "accuracy": "sixty"}))
    with pytest.raises(FedVLError, match="its 'accuracy' is 'sixty'"):
        _ = RunFolder(old).result
