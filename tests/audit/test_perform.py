"""A whole audit: every method is audited or says why not, and limits are kept."""

import json
import math
from dataclasses import replace

import pytest
from helpers.audited import evidence_of
from helpers.audits import made_up_audit, made_up_epsilon
from helpers.runs import OPENER

from fedvl.audit.finding import CLIENT, SERVER, Audit, Finding, Unmeasured
from fedvl.audit.perform import NAMES, audit, check_measured, exceeded, leaves, parse_limits, unexamined
from fedvl.audit.words import budget, remedies
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.runs.settings import resolve_experiment

SMALL = {
    "data": {"clients": 3, "shots": 6, "test_shots": 20},
    "federation": {"rounds": 1, "threads": 1},
    "training": {"local_epochs": 1},
}


def audited(method, **data):
    settings = {**SMALL, "method": {"name": method}, "data": {**SMALL["data"], **data}}
    return audit(resolve_experiment(settings), Silent(), clients=2, rounds=1, opener=OPENER)


@pytest.mark.parametrize("method", ["linear", "fed-mp"])
def test_an_audit_says_what_leaves_and_what_could_be_learned(method):
    found = audited(method)
    again = Audit.model_validate(json.loads(found.to_json()))
    assert again == found
    assert {each.name for each in (*found.findings, *found.unmeasured)} <= set(NAMES)
    for each in found.findings:
        assert each.interval[0] <= each.interval[1]
        assert all(map(math.isfinite, (each.value, each.chance, *each.interval)))
        assert each.sentence.endswith(".")
    names = [row.name for row in found.leaves]
    assert ("perturbed_texts" in names) is (method == "fed-mp")
    assert names[-3:] == ["weight in the mean", "training loss", "number of examples"]
    assert all(row.examined or row.note for row in found.leaves)
    assert "membership-replay" in {each.name for each in found.findings}
    assert ("residuals" in found.known_seed) is (method == "fed-mp")
    assert ("class-names-by-seed" in {each.name for each in found.findings}) is (method == "fed-mp")


@pytest.mark.parametrize("variant", ["flora", "hetlora"])
def test_clients_that_are_handed_factors_of_their_own_are_audited(variant):
    """A client begins with its own rank and, after the first round, beside a stack that has grown."""
    settings = {
        "method": {"name": "fedlora", "variant": variant, "ranks": [1, 2]},
        "data": {"clients": 2, "shots": 2, "test_shots": 4, "partition": "iid"},
        "federation": {"rounds": 2, "threads": 1},
        "training": {"local_epochs": 1},
    }
    found = audit(resolve_experiment(settings), Silent(), clients=2, rounds=2, opener=OPENER)
    server = {each.name: each for each in found.findings if each.view == "the server"}
    assert {"label-histogram", "membership"} <= server.keys()
    assert all(math.isfinite(each.value) for each in server.values())


def test_class_lists_of_several_datasets_do_not_stop_an_audit():
    found = audited("linear", dataset="cifar10-mini+emoji-mini", partition="disjoint", shots=3, test_shots=4)
    assert {"label-histogram", "membership"} <= {each.name for each in found.findings}


RAW = """
from fedvl.methods.linear import Linear
from fedvl.methods.roles import Sent


class Raw(Linear):
    def roles(self):
        return {"gist": Sent(lambda name, tensors, received, samples: samples.inputs["features"], (None, 256))}
"""


def test_raw_features_in_a_sent_tensor_are_found_and_fail_a_limit(tmp_path):
    """They are as wide as a text embedding too, so that names are sought in them."""
    path = tmp_path / "raw.py"
    path.write_text(RAW)
    found = audited(str(path))
    server = {each.name: each for each in found.findings if each.view == "the server"}
    assert server["membership-replay"].value == 1.0
    assert server["feature-recovery"].value == pytest.approx(1.0, abs=1e-3)
    assert exceeded(found, {"feature-recovery": 0.1})
    (gist,) = (row for row in found.leaves if row.name == "gist")
    assert set(gist.examined) >= {"membership-replay", "feature-recovery", "class-names"}
    (decoded,) = (each for each in found.unmeasured if each.name == "class-names-by-seed")
    assert "made of images, not of labels and the seed alone" in decoded.sentence
    assert found.headline.startswith(
        "With these messages the server could pick the training image out of two in 100 of"
    )


@pytest.mark.parametrize("method, reason", [("zero-shot", "no client sends anything"), ("centralised", "pooled")])
def test_where_nothing_is_sent_every_attack_says_so(method, reason):
    found = audited(method)
    assert found.findings == found.leaves == []
    assert [each.name for each in found.unmeasured] == list(NAMES)
    assert all(reason in each.sentence for each in found.unmeasured)


def of_figures(membership, *unmeasured):
    finding = Finding("membership", SERVER, "", membership, (0.5, 0.9), 0.5, "")
    return made_up_audit().model_copy(update={"findings": [finding], "unmeasured": list(unmeasured)})


def test_a_figure_above_its_limit_is_named():
    found = of_figures(0.7)
    assert exceeded(found, {"membership": 0.7, "picture": 0.0}) == []
    (sentence,) = exceeded(found, {"membership": 0.6})
    assert sentence == "membership from the view of the server is 0.7, above 0.6."


def test_a_limit_of_an_attack_that_gave_no_value_is_not_kept():
    found = of_figures(0.7, Unmeasured("picture", SERVER, "There is nothing to make a picture of."))
    check_measured(found, {"membership": 0.1})
    with pytest.raises(FedVLError, match=r"picture cannot be checked.* There is nothing to make a picture of"):
        check_measured(found, {"membership": 0.1, "picture": 10.0})
    with pytest.raises(FedVLError, match="class-names cannot be checked, since that attack was not made"):
        check_measured(found, {"class-names": 0.1})


def test_what_no_attack_examined_is_named_unless_it_is_constant():
    _, gist = made_up_audit().leaves
    examined = gist.model_copy(update={"name": "weight", "examined": ["membership"]})
    constant = gist.model_copy(update={"name": "images", "note": "the number of images alone"})
    assert unexamined([examined, constant, gist]) == ["gist"]


def test_what_another_view_examined_counts_for_nothing_at_the_server():
    evidence = evidence_of(rounds=1)
    finding = Finding("membership", CLIENT, "", 0.7, (0.6, 0.8), 0.5, "", items=("weight",))
    examined = {
        view: {row.name: row.examined for row in leaves(evidence, [replace(finding, view=view)])}
        for view in (CLIENT, SERVER)
    }
    assert examined[CLIENT]["weight"] == []
    assert examined[SERVER]["weight"] == ["membership"]
    assert examined[SERVER]["bias"] == []


def test_a_measured_epsilon_has_a_limit_too():
    found = made_up_audit().model_copy(update={"epsilon": made_up_epsilon(bound=1.5)})
    limits = parse_limits(["empirical-epsilon=1.2"])
    check_measured(found, limits)
    assert exceeded(found, limits) == ["empirical-epsilon is at least 1.5, above 1.2."]
    assert exceeded(found, {"empirical-epsilon": 1.5}) == []
    with pytest.raises(FedVLError, match="empirical-epsilon cannot be checked"):
        check_measured(found.model_copy(update={"epsilon": None}), limits)


@pytest.mark.parametrize("text", ["membership", "membership=", "membership=high", "membership=nan", "leak=0.5", ""])
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(FedVLError, match="--fail-above takes ATTACK=VALUE"):
        parse_limits([text])


@pytest.mark.parametrize(
    ("privacy", "federation", "told"),
    [
        ({"unit": "client"}, {}, "for each client, over all planned rounds; every client takes part in every round."),
        ({"unit": "client"}, {"per_round": 2}, "by a secret chance (Poisson sampling)."),
        ({"unit": "record"}, {}, "for each image, over all planned rounds; each image is in a step by a secret chance"),
    ],
)
def test_the_budget_says_epsilon_delta_unit_and_sampling(privacy, federation, told):
    found = budget(resolve_experiment({"privacy": privacy, "federation": federation}))
    assert found is not None
    assert found.startswith("At most epsilon 8 at delta 1e-05 ")
    assert told in found


def test_a_remedy_says_who_adds_the_noise():
    for summed, told in ((True, "Each client adds its share of it"), (False, "The server adds it")):
        settings = {"privacy": {"unit": "client", "clip": 1.0}, "federation": {"secure_sum": summed}}
        assert any(told in sentence for sentence in remedies(resolve_experiment(settings)))
