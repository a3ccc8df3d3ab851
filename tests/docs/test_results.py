"""Sentences of the pages with results that compare figures: computed again from the tables beside them."""

import re
from pathlib import Path

from tools.reproduced_page import figures_in, sections

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")
PRIVATE = (DOCS / "differential-privacy.md").read_text(encoding="utf-8")


def table(row: str, page: str = PAGE) -> dict[str, list[float]]:
    """Return the figures, without deviations, of the first table that has a row."""
    block = next(part for part in page.split("\n\n") if f"\n| {row} |" in part and part.lstrip().startswith("|"))
    found = {}
    for line in block.strip().splitlines()[2:]:
        name, *cells = line.strip("|").split("|")
        found[name.strip()] = [float(cell.split()[0]) for cell in cells]
    return found


def numbers(sentence: str, page: str = PAGE) -> list[float]:
    """Return the numbers that a sentence has in its brackets."""
    found = re.search(sentence, page)
    assert found, f"the page does not say {sentence}"
    return [float(number) for number in found.groups()]


def test_figures_of_recipes_are_those_of_the_reproduced_tables():
    """Every figure after a mending, beside the command of a recipe, is in that recipe's own table."""
    tables, recipe, compared = sections((DOCS / "reproduced.md").read_text(encoding="utf-8")), "", 0
    for line in PAGE.splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) != 4:
            continue
        _, _, after, command = cells
        if not command.startswith("the same"):
            found = re.search(r"`fedvl reproduce (\S+) --on embedded`", command)
            recipe = found[1] if found else ""
        if recipe:
            shown = set(figures_in(tables[recipe]).cells.values())
            figures = [float(figure) for figure in re.findall(r"(?<![\w.,])\d+\.\d(?![\d.])(?! M)", after)]
            assert set(figures) <= shown, f"{line} has figures that {recipe} does not show"
            compared += len(figures)
    assert compared > 20


def test_fst_cbdg_on_whole_cifar10_agrees_with_an_independent_implementation():
    figures = table("FST-CBDG, independent")
    ours, zero_shot = figures["FST-CBDG"], figures["zero-shot"][0]
    assert all(abs(one - two) < 1 for one, two in zip(ours, figures["FST-CBDG, independent"], strict=True))
    theirs, told = numbers(r"falls to ([0-9.]+) %\. Ours falls to ([0-9.]+) %")
    iid, *skewed = figures["sampling only, labels frozen"]
    assert iid == told < zero_shot < min(skewed)  # "skewed clients ... do not"
    assert abs(told - theirs) < 1
    assert zero_shot < min(ours)
    for name in ("FedAvg from the texts", "FedNTD from the texts"):
        iid, *skewed = figures[name]
        assert iid > ours[0] > zero_shot > max(skewed)


def test_fedntd_differs_from_fedavg_only_with_a_scale_or_a_large_weight():
    figures = table("FedNTD, the model's scale")
    plain, distilled = figures["FedAvg, no scale"], figures["FedNTD, no scale"]
    assert max(abs(one - two) for one, two in zip(plain, distilled, strict=True)) < 0.5
    scaled, distilled = figures["FedAvg, the model's scale"], figures["FedNTD, the model's scale"]
    assert "FedNTD is above FedAvg on both skewed splits and below it where clients are similar" in PAGE
    assert [two > one for one, two in zip(scaled, distilled, strict=True)] == [False, True, True]


def test_what_moves_keys_of_images_and_what_skew_costs():
    figures = table("untrained cache")
    untrained = figures["untrained cache"][0]
    gain = {size: [figure - untrained for figure in figures[f"SGD 0.001, batches of {size}"]] for size in (32, 1)}
    small, low, high = numbers(r"by ([0-9.]+) points in batches of 32, by (\d+) to (\d+) in batches of 1\.")
    assert [round(one, 1) for one in gain[32]] == [small] * 3  # one step a round: no partition matters
    assert (round(min(gain[1])), round(max(gain[1]))) == (low, high)
    trained = [row for name, row in figures.items() if name.startswith("AdamW")]
    assert len(trained) == 3
    assert all(iid > skewed > disjoint for iid, skewed, disjoint in trained)
    drops = [row[0] - row[2] for row in trained]
    low, high = numbers(r"with drops of (\d+) to (\d+) points from iid to disjoint")
    assert (round(min(drops)), round(max(drops))) == (low, high)


def test_what_moves_keys_of_flowers_and_what_small_batches_cost_adamw():
    figures = {name.removeprefix("Flowers, "): row for name, row in table("Flowers, untrained cache").items()}
    (gain,) = numbers(r"SGD at 0.001 in batches of 4 adds ([0-9.]+) points to the untrained cache, iid")
    assert round(figures["SGD 0.001, batches of 4"][0] - figures["untrained cache"][0], 1) == gain
    large = figures["AdamW 0.001, batches of 32"]
    assert sorted(large, reverse=True) == large  # the paper's order
    small = figures["AdamW 0.001, batches of 4 (preset `tip-adapter`)"]
    drops = [one - two for one, two in zip(large, small, strict=True)]
    told = numbers(r"ends below AdamW in batches of 32 by ([0-9.]+) to ([0-9.]+) points")
    assert [round(min(drops), 1), round(max(drops), 1)] == told


def test_what_prototypes_add_and_what_weights_of_clients_could():
    figures = table("all weight on the best client")
    added = [a - b for a, b in zip(figures["Fed-MP, paper preset"], figures["without prototypes"], strict=True)]
    told = numbers(r"on cifar10-mini, where they add ([0-9.]+) points, [0-9.]+ % on Pets,\s+where they add ([0-9.]+)\.")
    assert [round(one, 1) for one in reversed(added)] == told
    best, worst = figures["all weight on the best client"], figures["all weight on the worst client"]
    told = numbers(r"differs by ([0-9.]+) points on cifar10-mini and by ([0-9.]+) on Pets")
    assert [round(a - b, 2) for a, b in reversed(list(zip(best, worst, strict=True)))] == told
    assert "Adaptive aggregation cannot matter" in PAGE
    assert figures["Fed-MP, paper preset"] == figures["without adaptive aggregation"]


def test_what_noise_costs_prompts():
    figures = table("epsilon 8", PRIVATE)
    rows = [figures[name] for name in ("without", "epsilon 8", "epsilon 3", "epsilon 1")]
    (zero_shot,) = numbers(r"\(zero-shot ([0-9.]+)\)", PRIVATE)
    told = numbers(r"loses ([0-9.]+), ([0-9.]+) and ([0-9.]+) points at epsilon 8, 3 and 1", PRIVATE)
    drawn, words = ([row[column] for row in rows] for column in (4, 5))
    assert [round(words[0] - figure, 1) for figure in words[1:]] == told
    assert min(words) > zero_shot > max(drawn)  # "stays above", "ends below ... with noise and without"


def test_what_a_rate_of_their_own_does_to_prompts():
    figures = table("Fed-PRIME, iid")
    aware = [row for name, row in figures.items() if name.startswith("FedAvg-P")]
    pools = [row for name, row in figures.items() if not name.startswith("FedAvg-P")]
    (guess,) = numbers(r"guessing gives ([0-9.]+):")
    assert len(aware) == 2
    assert all(row[0] > row[1] == guess for row in aware)  # "guesses on both partitions"
    gains = [max(row[1:3]) - row[0] for row in pools]
    assert [round(min(gains), 1), round(max(gains), 1)] == numbers(r"adds ([0-9.]+) to ([0-9.]+) points to x 1 on")
    skewed, *others = [row for name, row in figures.items() if name.endswith("dirichlet:0.1")]
    least, most, alone = numbers(r"ahead at x 1 too on validation images \(([0-9.]+) to ([0-9.]+) against ([0-9.]+)\)")
    assert (min(row[0] for row in others), max(row[0] for row in others), skewed[0]) == (least, most, alone)
    for column, condition in ((3, "as trained"), (4, "complete samples")):
        leads = [row[column] - skewed[column] for row in others]
        told = numbers(condition + r" by ([0-9.]+) to ([0-9.]+) points")
        assert [round(min(leads), 1), round(max(leads), 1)] == told
