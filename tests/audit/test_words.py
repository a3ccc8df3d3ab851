"""The words of an audit: a headline for each verdict, risks, and what to do."""

import pytest
from helpers.audits import made_up_epsilon

from fedvl.audit.finding import CLIENT, SERVER, USER, Finding
from fedvl.audit.perform import NAMES
from fedvl.audit.words import by_risk, changes_of, headline, recommend, remedies, risk_of
from fedvl.config import resolve
from fedvl.runs.settings import resolve_experiment


def finding(name, interval, view=SERVER, chance=0.01):
    return Finding(name, view, "", sum(interval) / 2, interval, chance, "")


@pytest.mark.parametrize(
    ("interval", "says"),
    [
        (
            (0.32, 0.44),
            "With these messages the server could identify 38 of 100 training images at 1 % false alarms (chance: 1 of 100; "
            "95 % interval 32 to 44).",
        ),
        (
            (0.0, 0.03),
            "With these messages the server could identify at most 3 of 100 training images at 1 % false alarms, by the attacks "
            "that were tried (chance: 1 of 100).",
        ),
        (
            (0.0, 0.2),
            "It was not shown that the server could identify training images from these messages; it could identify up to 20 of "
            "100 training images at 1 % false alarms (chance: 1 of 100): too few images or clients were attacked to say more.",
        ),
    ],
)
def test_the_headline_has_the_number_and_the_verdict(interval, says):
    weaker = finding("membership-at-1-percent", (0.0, 0.02))
    assert headline([weaker, finding("membership-replay-at-1-percent", interval)]) == says


def test_without_a_threshold_the_headline_is_of_pairs_and_without_an_attack_it_says_so():
    pairs = finding("membership", (0.7, 0.8), chance=0.5)
    assert headline([pairs]) == (
        "With these messages the server could pick the training image out of two in 75 of 100 cases (chance: 50 of 100 "
        "cases; 95 % interval 70 to 80)."
    )
    assert headline([finding("label-histogram", (0.5, 0.6))]).endswith("was not measured.")


def test_every_attack_is_about_a_risk():
    assert {risk_of(name) for name in NAMES} == {"singling out", "linkability", "inference"}
    said = {row.risk: row.said for row in by_risk([finding("feature-linking", (0.5, 0.6))])}
    assert said["linkability"] == "shown: feature-linking by the server"
    assert said["inference"] == "not examined"


@pytest.mark.parametrize(
    ("view", "settings", "says"),
    [
        (SERVER, {}, "Use secure aggregation"),
        (SERVER, {"federation": {"secure_sum": True}}, "Sum over more clients"),
        (CLIENT, {}, "Add noise"),
        (USER, {"federation": {"secure_sum": True}}, "Add noise"),
        (SERVER, {"privacy": {"unit": "record"}}, "Combine record-level noise with secure aggregation"),
    ],
)
def test_what_is_recommended_follows_from_who_learns_and_what_is_on(view, settings, says):
    experiment = resolve_experiment({"method": {"name": "linear"}, **settings})
    found = recommend([finding("membership", (0.7, 0.8), view, 0.5)], [], experiment)
    assert any(sentence.startswith(says) for sentence in found)
    assert recommend([], ["gist"], experiment)[0].startswith("Do not rely on this audit for gist")
    assert recommend([], [], experiment)[0].startswith("No attack showed a leak")
    assert recommend([], [], experiment, made_up_epsilon(violated=True))[0].startswith(
        "Stop: the measured epsilon exceeds"
    )


@pytest.mark.parametrize(
    ("privacy", "bound"),
    [({}, "only client-level noise"), ({"unit": "client", "clip": 0.1}, "the noise of each client bounds")],
)
def test_a_page_names_what_secure_aggregation_does_not_hide(privacy, bound):
    settings = {"method": {"name": "linear"}, "federation": {"secure_sum": True}, "privacy": privacy}
    [sentence] = [each for each in remedies(resolve_experiment(settings)) if "difference of both sums" in each]
    assert "'left_out' in that client's log" in sentence
    assert bound in sentence
    assert not any(
        "difference of both sums" in each for each in remedies(resolve_experiment({"method": {"name": "linear"}}))
    )


def test_each_remedy_says_which_values_it_changes() -> None:
    """Secure sums change what the server sees; noise on images changes what tells of an image, and not class shares."""
    findings = [
        Finding("membership", SERVER, "AUC", 0.77, (0.70, 0.84), 0.5, ""),
        Finding("label-histogram", SERVER, "r", 0.5, (0.3, 0.7), 0.1, "", unit="r"),
        Finding("picture", USER, "PSNR", 14.4, (13.0, 15.0), 12.7, "", unit=" dB"),
    ]
    experiment = resolve([{"privacy": {"unit": "record"}}])
    summed, of_clients, of_images = changes_of(findings, experiment)
    assert [each.on for each in (summed, of_clients, of_images)] == [False, False, True]
    assert "it changes membership, label-histogram, from the view of the server" in summed.changes
    assert "it changes membership, label-histogram, picture" in of_clients.changes
    assert "it changes membership, picture, from every view" in of_images.changes
    assert "none of these values" in changes_of(findings[2:], experiment)[0].changes
    assert changes_of([], resolve([{"federation": {"secure_sum": True}}]))[0].on
