"""The recipes: all tables and figures are there, say what the papers say, can be run, and are run in small."""

import json
import math
from pathlib import Path

import pytest

from fedvl.comparisons.grid import read_recipe, recipe_names
from fedvl.comparisons.measures import MEASURES
from fedvl.comparisons.reproduce import EMBEDDED_LABEL, against_paper, arranged, missing_requirements
from fedvl.comparisons.run import perform_grid
from fedvl.data.catalogue import find
from fedvl.data.sources import Opener
from fedvl.display import GridDisplay, TerminalDisplay
from fedvl.errors import FedVLError
from fedvl.evaluation import leakage
from fedvl.report.page import write_comparison
from fedvl.runs import result
from fedvl.runs.settings import resolve_experiment

ALL = {
    "bench": ["base-to-new", "shots", "tuned"],  # of many papers
    "cachefl": ["figure1", "figure5", "figure6", "figure7", "table1", "table2"],
    "fed-mp": ["figure3", "figure4", "figure5", "table1", "table2", "table3"],
    "fed-prime": ["figure1", "table1", "table2"],
    "fedpp": ["figure3", "figure4", "figure5", "table1", "table2", "table3", "table4", "table5", "table6", "table7"],
    "fst-cbdg": ["figure2", "figure3", "table1", "table2", "table3", "table4"],
    "privacy": ["epsilon"],  # of no paper
}
NAMES = [f"{paper}/{name}" for paper, names in ALL.items() for name in names]
SLOW = {"cachefl/figure6", "fed-prime/figure1", "fed-prime/table1", "fed-prime/table2"}
THREADS = {
    "federation": {"threads": 1}
}  # the default, two, is many times slower for such small steps beside other tests
FEWER = {"fed-prime": {"data": {"test_shots": 2}}}  # it judges seven conditions with an encoder of pairs
EMBEDDED = {"cifar10-mini", "emoji-mini", "fedvl-tiny", "fedvl-tiny-vilt"}


@pytest.fixture(scope="module")
def opener() -> Opener:
    return Opener.once()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that recipes have in common are run once."""
    return tmp_path_factory.mktemp("runs")


def test_every_table_and_figure_has_its_recipe() -> None:
    assert recipe_names() == NAMES
    assert len(NAMES) == 35


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_describes_runs_that_there_are(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.title
    assert recipe.shows
    for embedded in (False, True):
        grid = arranged(recipe, embedded, quick=False, seeds=1)
        for case in grid.cases():
            experiment = resolve_experiment(case.settings)
            find(experiment.data.dataset)
            assert case.measure in MEASURES or case.measure.isprintable()
            if embedded:
                assert {experiment.data.dataset, experiment.model.name} <= EMBEDDED


def test_what_hides_clients_shows_none_of_them() -> None:
    """A preset may show the drift of single clients, which a private run refuses."""
    for embedded in (False, True):
        cases = arranged(read_recipe("privacy/epsilon"), embedded, quick=False, seeds=1).cases()
        assert not any(resolve_experiment(case.settings).federation.drift for case in cases)


@pytest.mark.parametrize(
    ("name", "row", "column", "figure"),
    [
        ("bench/base-to-new", "FedOTP", "base, %", 16.84),
        ("bench/base-to-new", "PromptFL", "HM3, %", 83.09),
        ("fst-cbdg/table1", "FST-CBDG", "CIFAR-100", 43.2),
        ("fst-cbdg/table2", "FedNTD", "CIFAR-10, s = 3", 64.1),
        ("fst-cbdg/table2", "FST-CBDG", "CINIC-10, s = 2", 65.9),
        ("fst-cbdg/table3", "Sampling only, labels frozen", "CIFAR-10, iid", 65.7),
        ("fed-mp/table1", "PromptFL", "UCF101, recall", 85.02),
        ("fed-mp/table1", "Fed-MP", "StanfordCars, F1", 97.2),
        ("fed-mp/table2", "Without multimodal prototyping", "Flower102, precision", 87.29),
        ("fed-mp/table3", "FedTPG", "trained parameters, %", 0.0549),
        ("fedpp/table1", "pFedPrompt, CPL", "RESISC45, β = 0.05", 66.79),
        ("fedpp/table2", "FedPP", "CUB", 56.31),
        ("fedpp/table7", "FPL", "CIFAR100", 57.81),
        ("cachefl/table1", "PromptFL", "FGVCAircraft, iid", 6.2),
        ("cachefl/table1", "CacheFL", "UCF101, pat", 71.5),
        ("cachefl/figure1", "AdapterFL", "EuroSAT", 26.7),
        ("fed-prime/table1", "miss image, FedMSplit-P", "MM-IMDB, full", 18.19),
        ("fed-prime/table2", "miss both, Fed-PRIME", "Food-101, image only", 70.38),
    ],
)
def test_figures_of_the_papers(name: str, row: str, column: str, figure: float) -> None:
    assert read_recipe(name).paper_figure(row, column) == figure


def test_where_the_paper_gives_no_figure_there_is_none() -> None:
    recipe = read_recipe("fed-prime/table1")
    assert recipe.paper_figure("miss both, Fed-PRIME", "Food-101, miss both") is None
    assert recipe.paper_figure("no such row", "Food-101, full") is None


@pytest.mark.parametrize("name", ["fed-prime/table1", "fed-prime/table2", "fed-prime/figure1"])
def test_a_round_of_fed_prime_moves_prompts_by_less_than_half_of_their_length(name: str) -> None:
    """Of the full recipes: a step of Adam moves a number by at most its rate while steps are this few."""
    recipe = read_recipe(name)
    width, patch, images = 768, 32, 4905  # of ViLT-B/32 and of Food-101's eight classes
    deviation = math.sqrt(6 / (3 * patch**2 + width)) / math.sqrt(3)  # of the uniform draw of prompts
    tested = 0
    for case in recipe.cases():
        found = resolve_experiment(case.settings)
        assert found.training.optimiser == "adam"
        if found.method.name in ("fed-prime", "fed-inter", "fed-intra"):
            steps = math.ceil(images / found.data.clients / found.training.batch_size) * found.training.local_epochs
            rate = found.training.learning_rate * case.settings["method"]["prompt_rate"]
            assert rate * steps / deviation < 0.5
            tested += 1
    assert tested


def test_averages_over_datasets_agree_with_the_papers_own() -> None:
    """CacheFL's table 1 (a), which the recipe leaves out: the figures were read rightly."""
    recipe = read_recipe("cachefl/table1")
    for row, averages in {"CLIP": (60.8,) * 3, "AdapterFL": (56.1, 56.2, 56.2), "CacheFL": (73.6, 70.9, 69.4)}.items():
        for split, average in zip(("iid", "dir", "pat"), averages, strict=True):
            found = [recipe.paper_figure(row, column) for column in recipe.columns if column.endswith(split)]
            assert len(found) == 11
            assert math.fsum(figure for figure in found if figure) / 11 == pytest.approx(average, abs=0.25)


def test_what_is_lacking_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDVL_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    sentences = missing_requirements(arranged(read_recipe("fed-mp/table1"), embedded=False, quick=False))
    told = "\n".join(sentences)
    assert len(sentences) == len(set(sentences)) == 6 + 1 + 1  # datasets, the model, the network's weights
    assert "hf download openai/clip-vit-large-patch14-336" in told
    assert str(tmp_path / "stanford-cars") in told
    assert "resnet18-imagenet.safetensors" in told


def test_cachefl_needs_generated_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDVL_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    def lacking(synthetic: str | None, row: str = "CacheFL") -> bool:
        settings = {"method": {"synthetic": synthetic}} if synthetic else {}
        recipe = arranged(read_recipe("cachefl/table2"), False, False, rows=[row], settings=settings)
        return any("CacheFL's generated images are missing" in sentence for sentence in missing_requirements(recipe))

    assert lacking(None)
    assert lacking(str(tmp_path / "none"))
    assert not any(map(lacking, (str(tmp_path), "held-out", "diffusers:a/b")))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lacking_on_the_embedded_model(name: str) -> None:
    assert missing_requirements(arranged(read_recipe(name), embedded=True, quick=True)) == []


def test_rows_are_chosen_by_part_of_their_names() -> None:
    recipe = read_recipe("fst-cbdg/table1")
    assert list(arranged(recipe, True, False, rows=["fed"]).rows) == ["FedAvg", "FedNTD"]
    with pytest.raises(FedVLError, match="No row of this recipe contains 'nothing'"):
        arranged(recipe, True, False, rows=["nothing"])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in NAMES])
def test_each_recipe_runs_in_small(
    name: str, runs: Path, opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result, "MAX_CALIBRATION_IMAGES", 20)  # that a temperature is fitted to, whatever clients hold
    monkeypatch.setattr(leakage, "SHOWN_EVERY", 2)
    monkeypatch.setattr(leakage, "STEPS", 2)  # tests of the attack itself take all steps
    recipe = read_recipe(name)
    grid = arranged(recipe, embedded=True, quick=True, settings=THREADS | FEWER.get(name.split("/")[0], {}))
    with TerminalDisplay(quiet=True) as display:
        outcome = perform_grid(grid, runs, GridDisplay(display), opener)
    summary = against_paper(name, recipe, outcome, [EMBEDDED_LABEL], "fedvl reproduce")
    assert summary.failures == []
    places = len(grid.rows) * len(grid.columns)
    drawn = {"curves": "series", "scatter": "points", "map": "points", "bubbles": "points", "panels": "points"}
    assert len(getattr(summary, drawn.get(grid.kind, "cells"))) == places
    for cell in summary.cells:
        assert cell.ours == cell.mean
        if cell.paper is not None:
            assert cell.difference == pytest.approx(cell.mean - cell.paper)
    json.dumps(summary.model_dump(), allow_nan=False)
    write_comparison(summary, tmp_path)
    assert EMBEDDED_LABEL.split(",")[0] in (tmp_path / "table.html").read_text(encoding="utf-8")
