import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from helpers.contents import result_of
from scipy.stats import binomtest

from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import mcnemar, wilson
from fedvl.report.page import write_report
from fedvl.report.run_page import best_caption, opening
from fedvl.report.tables import MINUS, MISSING, spread

HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(2)>"'&"""
PICTURE = "data:image/webp;base64,AAAA"
EXAMPLE = {"true": "cat", "zero_shot": "dog", "answer": "cat", "image": PICTURE}
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Text by the id of the elements around it, all tags with their attributes, and the tables as rows of cells."""

    def __init__(self, text):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.text = ""
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append((tag, values))
        if tag not in VOID:
            self.open.append((tag, values.get("id")))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data
        for _, name in self.open:
            if name:
                self.texts[name] = self.texts.get(name, "") + data
        if self.rows and any(tag in ("td", "th") for tag, _ in self.open) and ("svg", None) not in self.open:
            self.rows[-1][-1] += data

    def count(self, tag):
        return sum(found == tag for found, _ in self.tags)


@pytest.fixture
def page_of(tmp_path, save):
    def make(result, metrics=()):
        return Page(write_report(save(tmp_path / "run", result, list(metrics))).read_text(encoding="utf-8"))

    return make


def test_headline_numbers_equal_the_result(sample, page_of):
    result, metrics = sample
    result |= {"accuracy": 78.2, "zero_shot_accuracy": 66.5}
    page = page_of(result, metrics)
    assert page.texts["accuracy"] == "78.20 %"
    assert page.texts["zero-shot"] == "66.50 %"
    assert page.texts["difference"] == "+11.70 points"
    assert page.texts["test-images"] == f"{sum(map(sum, result['confusion'])):,}"


def test_the_share_of_a_backdoor_has_its_interval(sample, page_of):
    result, metrics = sample
    low, high = binomtest(270, 900).proportion_ci(method="wilson")
    page = page_of({**result, "backdoor_success": 30.0, "backdoor_images": 900}, metrics)
    assert f"30.00 % ({100 * low:.1f} to {100 * high:.1f})" in page.texts["scores"]
    assert "30.00 %" in page_of({**result, "backdoor_success": 30.0}, metrics).texts["scores"]  # of an older run


def test_every_share_has_its_interval_and_its_images(sample, page_of):
    """Of 1,000 images 782 are right after training and 665 before: 150 only after, 33 only before."""
    result, metrics = sample
    confusion = [[360, 140], [78, 422]]
    right, before = "1" * 782 + "0" * 218, "0" * 150 + "1" * 632 + "1" * 33 + "0" * 185
    result |= {"accuracy": 78.2, "zero_shot_accuracy": 66.5, "confusion": confusion, "class_names": ["a", "b"]}
    result |= {"per_class_recall": [72.0, 84.4], "zero_shot_per_class_recall": [60.0, 73.0], "partition_counts": None}
    page = page_of(result | {"right": right, "zero_shot_right": before}, metrics)
    low, high = binomtest(782, 1000).proportion_ci(method="wilson")
    assert f"{100 * low:.1f} to {100 * high:.1f}" in page.text
    test = mcnemar(before, right)
    assert test is not None
    told = (
        f"fst-cbdg gains 11.7 points of accuracy over zero-shot on 1,000 test images (95 %: {spread(test.interval)})."
    )
    assert told in page.text
    assert (
        "150 images right only after training, 33 images only before, of 1,000: McNemar's exact test, p < 0.001."
        in page.text
    )
    low, high = binomtest(360, 500).proportion_ci(method="wilson")
    assert ["a", "", "60.0", "72.0", "+12.0", f"{100 * low:.0f} to {100 * high:.0f}", "82.2", "500"] in page.rows


def test_costs_are_human_with_exact_figures_in_titles(sample, page_of):
    result, metrics = sample
    page = page_of(result, metrics)
    assert ["Trainable parameters", "5.12 k"] in page.rows
    total = sum(line["bytes_up"] + line["bytes_down"] for line in metrics)
    exact = {values.get("title") for tag, values in page.tags if tag == "span"}
    assert {"5,120 parameters", "20,480 bytes", f"{total:,} bytes", "3,145,728,000 FLOPs", "75.2 seconds"} <= exact


def test_every_round_is_in_the_table_and_in_the_tooltips(sample, page_of):
    result, metrics = sample
    page = page_of(result, metrics)
    for line in metrics:
        low, high = wilson(line["accuracy"], sum(map(sum, result["confusion"])))
        expected = [
            str(line["round"]),
            f"{line['accuracy']:.2f} % ({low:.1f} to {high:.1f})",
            f"{line['loss']:.4f}",
            "10",
            "0",
            "0",
            "205 kB",
            "205 kB",
            "250 ms",
        ]
        assert expected in page.rows
        tip = f"Round {line['round']}: {line['accuracy']:.2f} %, zero-shot {result['zero_shot_accuracy']:.2f} %"
        assert tip in page.texts["rounds"]


def test_recalls_are_sorted_by_change_and_tallied(sample, page_of):
    result, metrics = sample
    result |= {
        "class_names": ["a", "b", "c"],
        "per_class_recall": [50.0, 90.0, 70.0],
        "zero_shot_per_class_recall": [60.0, 60.0, 70.0],
    }
    result |= {"confusion": None, "partition_counts": None}
    page = page_of(result, metrics)
    rows = [row for row in page.rows if row[0] in ("a", "b", "c")]
    assert rows == [
        ["b", "", "60.0", "90.0", "+30.0", "", MISSING],
        ["c", "", "70.0", "70.0", "0.0", "", MISSING],
        ["a", "", "60.0", "50.0", f"{MINUS}10.0", "", MISSING],
    ]
    assert "1 gained, 1 lost, 1 unchanged, of 3 classes." in page.texts["recall"]


def test_a_class_without_test_images_has_a_row_that_says_so(sample, page_of):
    result, metrics = sample
    result["per_class_recall"][3] = None
    result["confusion"][3] = [0] * 10
    page = page_of(result, metrics)
    assert "of 10 classes; 1 without a test image, of which nothing is known." in page.texts["recall"]
    (row,) = (row for row in page.rows if row[0] == "cat")
    assert (row[3], row[-1]) == (MISSING, "0")


def test_precision_is_that_of_the_confusion_matrix(sample, page_of):
    result, metrics = sample
    page = page_of(result, metrics)
    for number, name in enumerate(result["class_names"]):
        named = sum(row[number] for row in result["confusion"])
        (row,) = (row for row in page.rows if row[0] == name and len(row) == 8)
        assert row[-2] == f"{100 * result['confusion'][number][number] / named:.1f}"


def test_trust_shows_shares_against_the_truth_and_what_unsure_answers_cost(sample, page_of):
    result, metrics = sample
    bins = [{"share": 40.0, "right": 30.0, "images": 10}, {"share": 90.0, "right": 80.0, "images": 30}]
    result |= {"reliability": bins, "uncalibrated_reliability": bins[::-1]}
    result |= {"sure": [{"least": 0.8, "unsure": 25.0, "images": 30, "accuracy": 90.0}]}
    page = page_of({**result, "temperature": 1.5, "temperature_from": "40 images that clients held out"}, metrics)
    assert "temperature of 1.5" in page.texts["trust"]
    assert "fitted to 40 images that clients held out, never to test images" in page.texts["trust"]
    assert ["Unsure below 80 %", "25.0 % of the answers; right of the others: 90.00 % (74.4 to 96.5)"] in page.rows
    assert "without temperature" in page.texts["trust"]
    page = page_of({**result, "uncalibrated_reliability": []}, metrics)
    assert "No temperature was fitted." in page.texts["trust"]


def test_cells_lead_to_their_images_once_the_page_of_these_exists(sample, tmp_path, save):
    folder = save(tmp_path / "run", *sample)
    links = [values.get("href") or "" for tag, values in Page(write_report(folder).read_text()).tags if tag == "a"]
    assert not any("images.html" in link for link in links)
    (folder / "images.html").write_text("")
    links = [values.get("href") or "" for tag, values in Page(write_report(folder).read_text()).tags if tag == "a"]
    cells = [(row, column) for row, counts in enumerate(sample[0]["confusion"]) for column, n in enumerate(counts) if n]
    assert links.count("images.html") == 1
    assert [link for link in links if "#" in link] == 2 * [  # for a desk and for a phone
        f"images.html#true={row}&predicted={column}" for row, column in cells
    ]


def test_many_classes_show_both_ends_and_the_most_confused_pairs(sample_of, page_of):
    result, metrics = sample_of(classes=31, clients=5)
    page = page_of(result, metrics)
    assert "7 classes lie between" in page.texts["recall"]
    assert page.texts["all-recalls"].count("class number") == 31
    mistakes = sorted(
        (count for i, row in enumerate(result["confusion"]) for j, count in enumerate(row) if i != j), reverse=True
    )
    pairs = [row for row in page.rows if len(row) == 5 and row[1].startswith("class number")]
    assert [int(row[2]) for row in pairs] == mistakes[:15]


def test_few_classes_show_the_confusion_matrix(sample, page_of):
    result, metrics = sample
    page = page_of(result, metrics)
    count = result["confusion"][3][3]
    assert f"cat predicted correctly: {count} of 100 ({count:.1f} %)" in page.texts["confusion"]


def test_troubles_are_counted_and_named(sample, page_of):
    result, metrics = sample
    result |= {
        "refused_updates": 2,
        "skipped_images": [{"image": "a.jpg", "reason": "truncated", "split": "test"}],
        "notes": ["One image was skipped."],
    }
    metrics[4]["refused"] = [{"client": 7, "reason": "norm above 5"}, {"client": 9, "reason": "not finite"}]
    metrics[2]["dropped"] = [1, 4, 9]
    metrics[3]["void"] = "The sum of round 4 has the weight 0."
    page = page_of(result, metrics)
    assert (page.texts["refused"], page.texts["dropped"], page.texts["skipped"]) == ("2", "3", "1")
    for row in (["5", "7", "norm above 5"], ["5", "9", "not finite"], ["3", "1, 4, 9"], ["a.jpg", "test", "truncated"]):
        assert row in page.rows
    assert "One image was skipped." in page.texts["notes"]
    assert "Round 4 has no update. The sum of round 4 has the weight 0." in page.texts["notes"]


def test_a_clean_run_says_so(sample, page_of):
    assert "No update was refused, no client dropped out, no image was skipped." in page_of(*sample).texts["troubles"]


def test_configuration_and_command_are_whole(sample, page_of):
    result, metrics = sample
    result["command"] = "fedvl run  --set 'a b=1' --out \"x&y\""
    page = page_of(result, metrics)
    assert page.texts["command"] == result["command"]
    assert ["method.sigma", "0.02"] in page.rows
    assert ["data.shots", "null"] in page.rows
    assert ["SHA-256 of what was trained", result["state_sha256"]] in page.rows


@pytest.mark.parametrize("classes", [10, 45])
def test_hostile_names_stay_text(sample_of, page_of, classes):
    """Both forms of each chart (few and many classes) and every text that comes from a user."""
    result, metrics = sample_of(classes=classes, clients=3)
    plain = page_of(result, metrics)
    result["confusion"][0][1] = 99  # so that it is among the most confused
    result["class_names"] = [HOSTILE, *result["class_names"][1:]]
    for key in (
        "method",
        "dataset",
        "model",
        "partition",
        "partition_note",
        "command",
        "device",
        "started",
        "preset",
        "protocol",
    ):
        result[key] = HOSTILE
    result["config"] = {HOSTILE: {HOSTILE: HOSTILE, "list": [HOSTILE]}}
    result["notes"] = [HOSTILE]
    result["skipped_images"] = [{"image": HOSTILE, "reason": HOSTILE, "split": HOSTILE}]
    metrics[0]["refused"] = [{"client": HOSTILE, "reason": HOSTILE}]
    metrics[0]["dropped"] = [HOSTILE]
    page = page_of(result, metrics)
    assert page.count("script") == plain.count("script") == 1
    assert page.count("img") == 0
    assert not [key for _, values in page.tags for key in values if key.startswith("on")]
    for section in ("notes", "partition", "recall", "confusion", "troubles", "command", "config"):
        assert HOSTILE in page.texts[section], section


def test_half_a_surrogate_pair_does_not_stop_the_page(sample, page_of):
    result, metrics = sample
    result["class_names"][0] = "bad \ud800 name"
    assert "bad \\ud800 name" in page_of(result, metrics).texts["all-recalls"]


def test_nothing_comes_from_outside(sample, tmp_path, save):
    save(tmp_path, *sample)
    (tmp_path / "examples.json").write_text(
        json.dumps({"gained": [EXAMPLE], "lost": [EXAMPLE | {"image": "http://x/y.png"}]})
    )
    text = write_report(tmp_path).read_text(encoding="utf-8")
    for _, values in Page(text).tags:
        assert not {"href", "xlink:href", "srcset", "action", "poster", "data"} & values.keys()
        assert values.get("src", PICTURE) == PICTURE
    assert PICTURE in text
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text


def test_the_policy_allows_the_very_script_on_the_page(sample, tmp_path, save):
    text = write_report(save(tmp_path, *sample)).read_text(encoding="utf-8")
    script = text.split("<script>")[1].split("</script>")[0]
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in text


def test_same_run_same_bytes_and_nothing_left_beside(sample, tmp_path, save):
    first = write_report(save(tmp_path / "a", *sample)).read_bytes()
    again = write_report(tmp_path / "a").read_bytes()
    moved = write_report(save(tmp_path / "b", *sample)).read_bytes()
    assert first == again == moved
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["metrics.jsonl", "report.html", "result.json"]


def test_zero_shot_has_no_rounds_and_no_difference(sample_of, page_of):
    result, _ = sample_of(rounds=0, method="zero-shot")
    page = page_of(result)
    assert "No rounds: nothing was trained." in page.texts["rounds"]
    assert "difference" not in page.texts
    assert "Recall of each class" in page.texts["recall"]


def test_the_least_result_still_gets_a_page(tmp_path):
    (tmp_path / "result.json").write_text('{"method": "linear"}')
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.texts["accuracy"] == "—"
    assert not {"partition", "recall", "confusion", "config", "command"} & page.texts.keys()


@pytest.mark.parametrize(
    "key",
    [
        "class_names",
        "partition_counts",
        "confusion",
        "per_class_recall",
        "zero_shot_per_class_recall",
        "zero_shot_accuracy",
        "per_round",
        "per_round_loss",
        "seconds",
        "config",
        "command",
        "notes",
        "skipped_images",
        "refused_updates",
        "clients",
        "local_flops",
    ],
)
@pytest.mark.parametrize("null", [True, False])
def test_any_one_key_may_be_missing_or_null(sample, page_of, key, null):
    result, metrics = sample
    del result[key]
    if null:
        result[key] = None
    assert page_of(result, metrics).texts["accuracy"] == f"{result['accuracy']:.2f} %"


def test_unreadable_metrics_are_said(sample, tmp_path, save):
    folder = save(tmp_path, *sample)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 11, "accu')
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert "1 line of metrics.jsonl could not be read" in page.texts["notes"]


def test_no_result_is_an_error_and_leaves_no_page(tmp_path):
    with pytest.raises(FedVLError, match="There is no run in"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_examples_name_what_an_image_was_and_is_taken_for(sample, tmp_path, save):
    save(tmp_path, *sample)
    lost = EXAMPLE | {"zero_shot": "cat", "answer": HOSTILE}
    broken = EXAMPLE | {"image": PICTURE + HOSTILE}
    (tmp_path / "examples.json").write_text(json.dumps({"gained": [EXAMPLE, broken], "lost": [lost]}))
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    words = " ".join(page.texts["examples"].split())
    assert (
        "Wrong before training, correct after cat was predicted as dog Correct before training, wrong after cat now predicted as"
        in words
    )
    assert HOSTILE in words
    assert page.count("img") == 2
    assert page.count("script") == 1


def test_the_missing_modality_protocol_shows_its_conditions_and_its_map(sample, page_of):
    result, metrics = sample
    conditions = [
        {"condition": name, "accuracy": 10.0 + n, "macro_f1": n, "macro_f1_interval": [0.0, 0.5]}
        for n, name in enumerate(["full", "text-only"])
    ]
    result |= {"zero_shot_accuracy": None, "zero_shot_per_class_recall": None, "conditions": conditions}
    result["embedding"] = {"x": [0, 1, 2], "y": [0, 1, 0], "label": [0, 0, 3], "present": ["both", "text", "both"]}
    page = page_of(result, metrics)
    assert ["full", "", "10.00 % (8.3 to 12.0)", "0.00 % (0.0 to 0.5)"] in page.rows
    assert ["text-only", "", "11.00 % (9.2 to 13.1)", "1.00 % (0.0 to 0.5)"] in page.rows
    assert {"zero-shot", "difference"}.isdisjoint(page.texts)
    for words in ("aeroplane (1)", "cat (1)", "text and image", "text only"):
        assert words in page.texts["map"]
    assert "image only" not in page.texts["map"]  # no sample lacks its text


def test_where_clients_are_not_tested_the_accuracy_of_their_mix_is_told_as_an_estimate(sample, page_of):
    result, metrics = sample
    mixes = {"per_client_mix_accuracy": [70.5, None, 81.25], "zero_shot_per_client_mix_accuracy": [60.0, None, 66.0]}
    page = page_of({**result, **mixes}, metrics)
    assert "Accuracy expected for each client" in page.texts["clients"]
    assert "an estimate" in page.texts["clients"]
    assert all(text in page.texts["clients"] for text in ("client 0", "70.50 %", "client 2", "81.25 %"))
    assert "client 1" not in page.texts["clients"]
    assert "expected for each client" not in page_of({**result, **mixes, "party": "north"}, metrics).text
    many = {"per_client_mix_accuracy": [50.0] * 41}
    assert "expected for each client" not in page_of({**result, **many}, metrics).text


def test_the_personal_protocol_shows_each_client_against_zero_shot(sample, page_of):
    result, metrics = sample
    result |= {"per_client_accuracy": [50.0, None, 75.0], "zero_shot_per_client_accuracy": [40.0, None, 80.0]}
    page = page_of(result, metrics)
    assert "client 0: 50.00 %, zero-shot 40.00 %" in page.texts["clients"]
    assert "client 2: 75.00 %, zero-shot 80.00 %" in page.texts["clients"]
    assert "client 1" not in page.texts["clients"]


def test_pages_and_tables_do_not_load_torch():
    code = "import sys, fedvl.report.page, fedvl.report.tables; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_opening_claims_no_more_than_the_figures():
    """Of 10 images 2 are gained and 1 is lost: p = 1; without letters there is no test."""
    result = {"method": "linear", "accuracy": 60.0, "zero_shot_accuracy": 50.0, "confusion": [[6, 4], [0, 0]]}
    assert opening(result_of(result)) == "linear gains 10.0 points of accuracy over zero-shot on 10 test images."
    letters = {"right": "1111110000", "zero_shot_right": "0011111000"}
    assert "which may be chance" in opening(result_of(result | letters))
    assert opening(result_of(result | {"accuracy": 40.0})).startswith("linear loses 10.0 points")
    assert "neither gains nor loses" in opening(result_of(result | {"accuracy": 50.0, "confusion": [[1, 0], [0, 0]]}))
    assert "on 1 test image." in opening(result_of(result | {"accuracy": 50.0, "confusion": [[1, 0], [0, 0]]}))
    assert opening(result_of(result | {"method": "zero-shot"})) == ""


def test_the_best_round_is_named():
    assert best_caption(result_of({}), [(1, 60.0), (2, 70.0), (3, 70.0)]) == "Best round: 2, 70.00 %."
    assert (
        best_caption(result_of({"best_round": 2}), [(1, 60.0), (2, 70.0)])
        == "Best round: 2, the last, 70.00 %; its model is kept."
    )
    assert best_caption(result_of({}), [(1, 60.0)]) == ""


def test_true_pseudo_labels_are_drawn_beside_accuracy(sample, page_of):
    """The ring marks the best accuracy alone."""
    result, metrics = sample
    values = [60.0 + index for index in range(len(result["per_round"]))]
    text = page_of({**result, "per_round_pseudo_label_accuracy": values}, metrics).text
    assert f"true pseudo-labels {values[-1]:.2f} %" in text
    assert "true pseudo-labels" not in page_of(result, metrics).text
