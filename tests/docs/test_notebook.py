"""The first notebook, as a reader runs it: from a clean kernel, in an empty folder, from the first cell to the last."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # all of them: one process executes it, once

NOTEBOOK = Path(__file__).parents[2] / "docs" / "first-steps.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
# Asked in the same kernel, after the last cell.
FACTS = """
import json
print(json.dumps({
    "linear": [result.accuracy, result.zero_shot_accuracy],
    "fst-cbdg": [unlabelled.accuracy, unlabelled.zero_shot_accuracy],
    "mine": [mine.accuracy, mine.zero_shot_accuracy],
    "same": again.figures == result.figures,
    "means": comparison.to_pandas().pivot(index="row", columns="column", values="mean").to_dict(),
    "seeds": sorted(set(comparison.to_pandas().n.tolist())),
    "photo": result.predict("photo.png").iloc[0][["name", "zero_shot"]].tolist(),
    "names": prompts.predict("photo.png", classes=["steamboat", "sports car", "songbird"]).name[0],
}))
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook with its outputs; an error in any cell fails."""
    import nbclient
    import nbformat

    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(FACTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("FEDVL_CACHE", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        (folder / "work").mkdir()
        nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder / "work")}}).execute()
    return notebook


def test_it_is_committed_without_outputs():
    assert [cell["id"] for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.timeout(600)
def test_it_runs_and_what_it_says_is_so(executed):
    facts = json.loads(executed.cells[-1].outputs[0].text)
    for name in ("linear", "fst-cbdg", "mine"):
        accuracy, zero_shot = facts[name]
        assert accuracy > zero_shot + 2, name
    assert facts["same"]
    for column in ("iid", "dirichlet:0.1"):
        means = facts["means"][column]
        assert means["zero-shot"] < means["fst-cbdg"] < means["linear"]
    assert facts["seeds"] == [3]
    assert facts["photo"] == ["ship", "airplane"]  # as the text before it says
    assert facts["names"] == "steamboat"


def test_every_cell_shows_something_and_no_cell_a_warning(executed):
    for cell in executed.cells:
        if cell.cell_type == "code":
            kinds = [output.output_type for output in cell.outputs]
            assert kinds, cell.id
            assert len(kinds) == len(set(kinds)), f"{cell.id}: one line of progress, one result"
            assert not [output for output in cell.outputs if output.get("name") == "stderr"], cell.id


def test_its_links_lead_to_pages():
    text = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) >= 5
    assert [link for link in links if not (NOTEBOOK.parent / link).is_file()] == []
