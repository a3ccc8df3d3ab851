"""Sentences of the pages with results that compare figures: computed again from the tables beside them."""

import math
import re
from pathlib import Path

import pytest

from fedvl.comparisons.grid import read_recipe
from tools.reproduced_page import figures_in, sections

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")
PRIVATE = (DOCS / "differential-privacy.md").read_text(encoding="utf-8")


def table(row: str, page: str = PAGE) -> dict[str, list[float]]:
    """Return the figures, without deviations, of the first table that has a row; an empty cell is no number."""
    block = next(part for part in page.split("\n\n") if f"\n| {row} |" in part and part.lstrip().startswith("|"))
    found = {}
    for line in block.strip().splitlines()[2:]:
        name, *cells = line.strip("|").split("|")
        found[name.strip()] = [float(cell.split()[0]) if cell.strip() else math.nan for cell in cells]
    return found


def numbers(sentence: str, page: str = PAGE) -> list[float]:
    """Return the numbers that a sentence has in its brackets."""
    found = re.search(sentence, page, re.DOTALL)
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


def test_fst_cbdg_on_all_splits_of_whole_cifar10():
    figures = table("equal sampling")
    zero_shot, (free,) = figures["zero-shot"][0], [row for name, row in figures.items() if "no labels" in name]
    assert zero_shot < min(free)  # "beats the zero-shot model on every split"
    for name in ("equal sampling", "self-training only"):  # "hardly move the head"
        assert max(abs(figure - zero_shot) for figure in figures[name]) < 0.5
    splits = [
        "iid",
        "shards:10",
        "shards:5",
        "shards:3",
        "shards:2",
        *(f"dirichlet:{a}" for a in (0.5, 0.3, 0.1, 0.05)),
    ]
    frozen = dict(zip(splits, figures["sampling only, labels frozen"], strict=True))
    assert [frozen["iid"]] == numbers(r"to ([0-9.]+) % if they are alike")
    assert {split for split in splits if frozen[split] < zero_shot} == {"iid", "shards:10", "shards:5", "dirichlet:0.5"}
    beside = table("FST-CBDG, independent")
    places = [splits.index(split) for split in ("iid", "shards:2", "dirichlet:0.1", "dirichlet:0.05")]
    for name in ("sampling only, labels frozen", "FedAvg from the texts", "FedNTD from the texts", "zero-shot"):
        assert beside[name] == [figures[name][place] for place in places]
    assert beside["FST-CBDG"] == [free[place] for place in places]


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
    shown = figures_in(sections((DOCS / "reproduced.md").read_text(encoding="utf-8"))["privacy/epsilon"])
    for name, noise in (
        ("without", "no noise"),
        ("epsilon 8", "ε = 8"),
        ("epsilon 3", "ε = 3"),
        ("epsilon 1", "ε = 1"),
    ):
        assert figures[name] == [shown.cells[row, noise] for row in shown.rows if row != "FedPP"]
    told = numbers(r"alone\): ([0-9.]+) without\s+noise and ([0-9.]+), ([0-9.]+) and ([0-9.]+) at epsilon 8", PRIVATE)
    assert told == [shown.cells["FedPP", column] for column in shown.columns]
    rows = [figures[name] for name in ("without", "epsilon 8", "epsilon 3", "epsilon 1")]
    (zero_shot,) = numbers(r"\(zero-shot ([0-9.]+)\)", PRIVATE)
    told = numbers(r"loses ([0-9.]+), ([0-9.]+) and ([0-9.]+) points at epsilon 8, 3 and 1", PRIVATE)
    drawn, words = ([row[column] for row in rows] for column in (4, 5))
    assert [round(words[0] - figure, 1) for figure in words[1:]] == told
    assert min(words) > zero_shot > max(drawn)  # "stays above", "ends below ... with noise and without"


METHODS = ("FedAvg-P", "Fed-Inter", "Fed-Intra", "Fed-PRIME")
METHOD_OF = {method.lower(): method for method in METHODS}


def chosen_by_validation(partition):
    """Return each method's row of the test at the rate with the highest accuracy on validation images."""
    rates, beside = table(f"Fed-PRIME, {partition}"), f"| {partition}, test, at the rate that validation chose"
    figures, chosen = table("Fed-PRIME, x 1000", PAGE[PAGE.index(beside) :]), {}
    for method in METHODS:
        validation, test = rates[f"{method}, {partition}"][:3], rates[f"{method}, {partition}"][3:]
        best = validation.index(max(validation))
        chosen[method] = figures[f"{method}, x {10 ** (best + 1) if best else 1}"]
        assert chosen[method][3] == test[best]
        assert abs(chosen[method][3] - sum(chosen[method][:3]) / 3) < 0.1
    return chosen


def test_without_skew_fed_prime_is_as_good_as_intra_at_the_rates_that_validation_chose():
    chosen = chosen_by_validation("iid")
    aware, inter, intra, prime = (chosen[method] for method in METHODS)
    told = numbers(
        r"above Fed-Inter with each seed, by ([0-9.]+) to ([0-9.]+) points, and level with FedAvg-P or above it, by ([0-9.]+) to "
        r"([0-9.]+), but Fed-Intra is as\s+good \(([0-9.]+) to ([0-9.]+) in the mean"
    )
    over = [
        sorted(round(one - two, 1) for one, two in zip(prime[:3], other[:3], strict=True)) for other in (inter, aware)
    ]
    assert [over[0][0], over[0][2], over[1][0], over[1][2], intra[3], prime[3]] == told
    assert all(prime[column] == max(row[column] for row in chosen.values()) for column in (4, 5, 6))
    rates = table("Fed-PRIME, iid")
    at_one = {method: rates[f"{method}, iid"][3] for method in METHODS}
    assert max(METHODS, key=lambda method: at_one[method]) == "FedAvg-P"  # "At x 1 FedAvg-P is above the three pools"


def test_with_skew_fed_prime_leads_at_the_rates_that_validation_chose():
    chosen = chosen_by_validation("dirichlet:0.1")
    aware, *_, prime = (chosen[method] for method in METHODS)
    leads = [prime[seed] - max(chosen[method][seed] for method in METHODS[:3]) for seed in range(3)]
    told = numbers(r"by ([0-9.]+) to ([0-9.]+) points over the next, and by\s+([0-9.]+) to ([0-9.]+) over FedAvg-P")
    over = [one - two for one, two in zip(prime[:3], aware[:3], strict=True)]
    assert [round(one, 1) for one in (min(leads), max(leads), min(over), max(over))] == told
    assert min(leads) > 0  # "with each of the three seeds"
    assert [round(prime[3] - aware[3], 1)] == numbers(
        r"In the mean it is ([0-9.]+) points above FedAvg-P, which is last"
    )
    assert aware[3] == min(row[3] for row in chosen.values())


def test_pages_of_methods_have_the_figures_of_the_results():
    page = (DOCS / "methods" / "fed-prime.md").read_text(encoding="utf-8")
    order = r"Fed-PRIME\s+\(([0-9.]+) %\) is above Fed-Inter \(([0-9.]+)\), Fed-Intra \(([0-9.]+)\) and FedAvg-P \(([0-9.]+)\)"
    means = {name.split(", ")[0]: row[3] for name, row in table("Fed-PRIME, x 1000").items()}
    told = numbers(order, page)
    assert told == [means[name] for name in ("Fed-PRIME", "Fed-Inter", "Fed-Intra", "FedAvg-P")]
    assert told == sorted(told, reverse=True)
    page = (DOCS / "methods" / "fst-cbdg.md").read_text(encoding="utf-8")
    figures = table("FST-CBDG, independent")
    told = numbers(r"between ([0-9.]+) % and ([0-9.]+) %.*?falls from ([0-9.]+) % to ([0-9.]+) %", page)
    ours, averaged = figures["FST-CBDG"], figures["FedAvg from the texts"]
    assert told == [max(ours), min(ours), averaged[0], averaged[-1]]


def test_what_stays_with_a_client_and_how_contexts_begin():
    page = (DOCS / "methods" / "field.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| ([0-9.]+) \| 5[0-9.]+ \|", page, re.MULTILINE))
    figures = {name.replace("`", ""): float(figure) for name, figure in rows.items()}
    for name in ("fedpgp", "promptfolio", "pfedmoap", "fedpha"):  # "end higher than contexts that begin as words"
        assert figures[name] > figures[f"{name}, begun as words"]
    untrained = figures['"a photo of a NAME.", untrained']
    gains = [figures[name] - untrained for name in ("promptfolio, begun as words", "pfedmma, its paper's rate")]
    assert [round(gain, 1) for gain in gains] == numbers(r"they gain ([0-9.]+) and ([0-9.]+) points", page)
    for name in ("PromptFL, for comparison", "PromptFL, begun as words", "promptfolio, begun as words"):
        assert figures[name] < 52.2  # zero-shot


def test_what_a_rate_of_their_own_does_to_prompts():
    rates = table("Fed-PRIME, dirichlet:0.1")
    skewed = {method: rates[f"{method}, dirichlet:0.1"] for method in METHODS}
    pools = [skewed[method] for method in METHODS[1:]]
    spread = [max(row[column] for row in pools) - min(row[column] for row in pools) for column in (3, 4)]
    told = numbers(
        r"at x 1 the three pools are within ([0-9.]+) points of each other on the test, and at x 100 within ([0-9.]+)\."
    )
    assert [round(one, 1) for one in spread] == told
    gain, loss = skewed["Fed-PRIME"][2] - skewed["Fed-PRIME"][0], skewed["FedAvg-P"][0] - skewed["FedAvg-P"][2]
    told = numbers(r"x 1000 adds ([0-9.]+) points to Fed-PRIME on validation images and takes ([0-9.]+) from FedAvg-P")
    assert [round(gain, 1), round(loss, 1)] == told
    (intra,) = numbers(r"Fed-Intra has ([0-9.]+) there at x 1000, where validation prefers x 100")
    assert intra == max(skewed["Fed-Intra"][3:]) == skewed["Fed-Intra"][5]
    assert max(skewed["Fed-Intra"][:3]) == skewed["Fed-Intra"][1]


def test_a_bound_keeps_the_inter_pool_and_its_bytes():
    name = "Fed-PRIME, dirichlet:0.1, x 1000"
    figures = table(name)
    costs = []
    for row in (name, "Fed-Inter, dirichlet:0.1, x 1000", "Fed-PRIME, iid, x 1000"):
        free, kept = figures[row], figures[f"{row}, at most 20 prompts"]
        assert kept[:6] == [20] * 6
        assert min(free[:6]) > 20
        assert kept[6] == kept[7] == free[6] < free[7]
        costs.append(round(free[8] - kept[8], 1))
    two, three, gained = numbers(r"it cost ([0-9.]+) and ([0-9.]+) points with skew and gained ([0-9.]+) without")
    assert costs == [two, three, -gained]
    for row, figure in figures.items():
        assert row.endswith(("x 100", "x 1000", "prompts")) or max(figure[:6]) < 20  # "At x 1 the pool shrinks"


def test_the_embedded_recipes_have_the_rates_of_the_small_form():
    figures = table("Fed-PRIME")
    (guess,) = numbers(r"guessing gives ([0-9.]+):")
    assert figures["FedAvg-P"][1] == figures["FedAvg-P"][4] == guess  # "guesses on both partitions"
    columns = {"fed-prime/table1": slice(0, 3), "fed-prime/table2": slice(3, 6)}
    for recipe, rates in columns.items():
        compared = set()
        for case in read_recipe(recipe).on_embedded().cases():
            if (method := METHOD_OF.get(case.settings["method"]["name"])) in METHODS:
                best = figures[method][rates].index(max(figures[method][rates]))
                assert case.settings["method"].get("prompt_rate", 1) == (1, 100, 1000)[best]
                compared.add(method)
        assert "Fed-PRIME" in compared


def test_the_small_form_chooses_by_chance_and_what_the_recipes_keep_is_told():
    before, now = table("Fed-PRIME"), table("Fed-PRIME, now")

    def best(row, first):
        return row[first : first + 3].index(max(row[first : first + 3]))

    assert best(now["Fed-PRIME, now"], 0) == 0 != best(before["Fed-PRIME"], 0)  # "would have x 1 without skew"
    assert all(abs(figure - 14.3) < 3 for row in now.values() for figure in row[3:])  # "nobody learns"
    kept = {(method, split) for method in ("FedAvg-P", "Fed-Intra") for split in ("iid", "dirichlet:0.1")} | {
        ("Fed-PRIME", "iid")
    }
    for method in METHODS:
        for first, partition in ((0, "iid"), (3, "dirichlet:0.1")):
            long = table(f"Fed-PRIME, {partition}")[f"{method}, {partition}"]
            assert (best(before[method], first) == best(long, 0)) == ((method, partition) in kept)


@pytest.mark.parametrize("recipe", ["fedpp/table1", "fedpp/table2", "fedpp/table4"])
def test_labels_made_once_end_higher_after_little_training_alone(recipe):
    note = read_recipe(recipe).on_embedded().note
    shown = figures_in(sections((DOCS / "reproduced.md").read_text(encoding="utf-8"))[recipe])
    assert "the row with labels made once ends higher" in note
    assert all(
        shown.cells["FedPP, labels made once", column] > shown.cells["FedPP", column] for column in shown.columns
    )
    renewed, once = numbers(r"renewed against made once: ([0-9.]+) \| both made once: ([0-9.]+)")
    assert ("it ends lower" not in note) or once < renewed


def test_how_much_higher_labels_made_once_end_after_little_training():
    found = sections((DOCS / "reproduced.md").read_text(encoding="utf-8"))
    leads = []
    for recipe in ("fedpp/table1", "fedpp/table2"):
        cells = figures_in(found[recipe]).cells
        leads += [
            cells["FedPP, labels made once", column] - cells[row, column] for row, column in cells if row == "FedPP"
        ]
    told = numbers(r"end above renewed ones in every column, by ([0-9.]+) to\s+([0-9.]+) points")
    assert len(leads) == 3
    assert [round(min(leads), 1), round(max(leads), 1)] == told


@pytest.mark.parametrize("recipe", ["fed-prime/table1", "fed-prime/table2"])
def test_how_far_fed_primes_small_tables_are_from_guessing(recipe):
    note = read_recipe(recipe).on_embedded().note
    shown = sorted(figures_in(sections((DOCS / "reproduced.md").read_text(encoding="utf-8"))[recipe]).cells.values())
    (guess,) = numbers(r"Guessing gives ([0-9.]+) %", note)
    assert guess == round(100 / 9, 1)
    if "most figures are within 2 points of it" in note:
        assert shown[len(shown) // 2] <= guess + 2
    else:
        assert "no figure is more than 10 points above it" in note
        assert shown[-1] <= guess + 10
