"""The pages of a run between machines: the server's names its parties, a party's knows of itself alone."""

import re
from typing import Any

import pytest
from helpers.contents import result_of

from fedvl.report.page import write_report
from fedvl.report.tables import cost_rows

PARTIES = [
    {"name": name, "bytes_up": 2000 + number, "bytes_down": 4000} for number, name in enumerate(["a<b", "south"])
]
ANSWERS = [
    {"round": 1, "client": 0, "time": "2026-01-02T03:04:05.678+00:00"},
    {"round": 1, "client": 1, "time": "2026-01-02T03:04:07.000+00:00"},
    {"round": 2, "client": 1, "time": "2026-01-02T03:05:00.000+00:00"},
    {"round": 3, "client": 1, "time": "yesterday"},
]
ROUNDS = [
    {"round": 1, "cohort": [0, 1], "dropped": [], "refused": [{"client": 1, "reason": "too large"}]},
    {"round": 2, "cohort": [0, 1], "dropped": [0], "refused": []},
    {"round": 3, "cohort": [1], "dropped": [], "refused": []},
]
COMMAND = "fedvl server clinic\nfedvl client south --data IMAGES"


def page(save, folder, result, rounds):
    return write_report(save(folder, result, rounds)).read_text()


def rows(text, heading):
    """The cells of the first table after a heading."""
    body = text.split(heading, 1)[1].split("<tbody>", 1)[1].split("</tbody>", 1)[0]
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in body.split("<tr>")[1:]]


@pytest.fixture
def server(sample):
    result, _ = sample
    told = {"partition": None, "parties": PARTIES, "answers": ANSWERS, "command": COMMAND, "local_flops": None}
    return {**result, **told, "config": {"data": {"partition": "dirichlet:0.5", "dataset": "skin"}}}


def test_the_servers_page_says_who_answered_when_and_how_much_was_sent(server, save, tmp_path):
    text = page(save, tmp_path, server, ROUNDS)
    assert rows(text, "Who took part") == [
        ["a&lt;b", "1", "1", "0", "2.00 kB", "4.00 kB", "2026-01-02 03:04:05"],
        ["south", "3", "0", "1", "2.00 kB", "4.00 kB", "—"],
    ]
    assert rows(text, "Who answered when") == [
        ["1", "03:04:05", "03:04:07, refused"],
        ["2", "dropped", "03:05:00"],
        ["3", "not asked", "—"],
    ]
    assert rows(text, "Refused updates") == [["1", "south", "too large"]]
    assert rows(text, "Dropped clients") == [["2", "a&lt;b"]]


def test_the_servers_page_invents_nothing(server, save, tmp_path):
    text = page(save, tmp_path, server, ROUNDS)
    assert "dirichlet" not in text
    assert "Local training" not in text
    assert re.sub("<.*?>", "", text.split('id="command">')[1].split("</code>")[0]) == COMMAND


def test_a_revoked_party_is_named_so_and_one_that_sent_nothing_is_not_in_the_title(server, save, tmp_path):
    parties = [{**PARTIES[0], "bytes_up": 0, "revoked": "2026-01-02T03:04:05.678+00:00"}, PARTIES[1]]
    text = page(save, tmp_path, {**server, "parties": parties}, ROUNDS)
    assert rows(text, "Who took part")[0][0] == "a&lt;b (revoked on 2026-01-02)"
    assert "· south ·" in text


def test_a_simulation_has_no_parties(sample, save, tmp_path):
    text = page(save, tmp_path, *sample)
    assert "Who took part" not in text
    assert any("largest client" in row.label for row in cost_rows(result_of(sample[0])))


def test_a_partys_page_shows_its_own_images_and_rounds_alone(sample, save, tmp_path):
    result, _ = sample
    names = ["cat", "dog"]
    counts = {"partition_class_names": names, "partition_counts": [[7, 5]], "partition": None, "clients": 3}
    record = {"round": 1, "cohort": [2], "dropped": [], "loss": None, "bytes_up": 10, "bytes_down": 20, "seconds": 2.0}
    refused = [{"client": 2, "reason": "Not at this hour."}]
    result = {**result, **counts, "party": "south", "per_round": [], "per_round_loss": [None], "refused_updates": 1}
    text = page(save, tmp_path, result, [{**record, "refused": refused}])
    assert "south, one of 3 parties" in text
    assert "south was asked in 1 round, and tested only the final model." in text
    assert "Training images of south" in text
    assert "12 images by class." in text
    assert "Client 0" not in text
    assert re.findall(r'<th scope="col" class="n">(\w+)</th>', text) == [
        "round", "dropped", "refused", "up", "down", "time",
    ]  # fmt: skip
    assert "Requests that it refused" in text
    assert rows(text, "Refused requests") == [["1", "south", "Not at this hour."]]
    assert any(row.label == "Local training, per round" for row in cost_rows(result_of(result)))


def test_a_party_of_unlabelled_images_has_nothing_to_draw_or_to_test(sample, save, tmp_path):
    result, rounds = sample
    nothing: dict[str, Any] = {
        "accuracy": None,
        "zero_shot_accuracy": None,
        "per_round": [],
        "confusion": [],
        "per_class_recall": [],
    }
    result = {**result, **nothing, "party": "south", "partition_counts": [[0] * 10]}
    text = page(save, tmp_path, result, [{key: record[key] for key in ("round", "bytes_up")} for record in rounds])
    assert "Training images of" not in text
    assert f"south was asked in {len(rounds)} rounds, and has no test images." in text
