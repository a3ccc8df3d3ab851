"""Settings that do not fit each other are refused in one sentence, with what to do."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.small import small_method, small_task

from fedvl.config import MANY, Experiment
from fedvl.errors import FedVLError
from fedvl.methods import load_method
from fedvl.methods.base import Method, SumNoise
from fedvl.methods.linear import Linear
from fedvl.methods.parts.selection import Selection
from fedvl.runs.requirements import (
    check_classes,
    check_method,
    check_model,
    check_private_choice,
    check_settings,
    check_united,
    check_withdrawn,
    rule_between_machines,
    rule_note,
    statistics_note,
)
from fedvl.runs.settings import resolve_experiment


def private(unit: str = "record", **data: Any) -> Experiment:
    return resolve_experiment({"privacy": {"unit": unit}, "data": data})


@pytest.mark.parametrize("data", [{"shots": 16}, {"long_tail": 10.0}])
def test_images_that_are_chosen_by_the_labels_of_others_are_refused_at_a_partys_own_data(data: dict[str, Any]) -> None:
    with pytest.raises(FedVLError, match=f"one image decides about others; use --set data.shots={MANY}"):
        check_private_choice(private(**data), simulated=False)
    check_private_choice(private(**data), simulated=True)  # drawn from a pool, before anything is a client's
    check_private_choice(private("client", **data), simulated=False)
    check_private_choice(private("none", **data), simulated=False)
    check_private_choice(private(shots=MANY), simulated=False)
    check_private_choice(private(missing="both:0.5"), simulated=False)


def test_shots_of_each_client_are_refused_in_simulation_too() -> None:
    for simulated in (True, False):
        with pytest.raises(FedVLError, match=r"data\.client_shots chooses among a client's images by their labels"):
            check_private_choice(private(client_shots=4), simulated)


class Plain(Linear):
    requires = {"optimiser": "sgd", "momentum": 0.0}


class Corrected(Linear):
    def correct(self, gradients: Any, tensors: Any, received: Any) -> Any:
        return gradients


def test_a_method_refuses_settings_of_training_for_which_it_was_not_derived() -> None:
    method = Plain(Plain.options_type(), small_task())
    for training, sentence in (
        ({"optimiser": "adam"}, "derived for training.optimiser=sgd, and it is adam; use --set training.optimiser=sgd"),
        ({"momentum": 0.5}, "derived for training.momentum=0.0, and it is 0.5; use --set training.momentum=0.0"),
    ):
        with pytest.raises(FedVLError, match=sentence):
            check_method(method, resolve_experiment({"training": training}))
    check_method(method, resolve_experiment({"training": {"momentum": 0.0, "weight_decay": 0.1}}))


def test_corrected_gradients_are_refused_where_those_of_single_images_are_clipped() -> None:
    method = Corrected(Corrected.options_type(), small_task())
    with pytest.raises(
        FedVLError, match="corrects gradients, and record-level privacy clips and hides those of the loss"
    ):
        check_method(method, resolve_experiment({"privacy": {"unit": "record"}}))
    check_method(method, resolve_experiment({"privacy": {"unit": "client"}}))


def checked(settings: dict[str, Any], simulated: bool = True) -> None:
    """All checks of settings and of a method with its own options."""
    experiment = resolve_experiment(settings)
    check_settings(experiment, simulated)
    check_withdrawn(experiment)
    method = small_method(experiment.method.name, **experiment.method.options)
    if experiment.privacy.unit != "none":
        method.task = replace(method.task, noise=SumNoise(1.0, 1000, experiment.privacy.clip))
    check_method(method, experiment)


def of(name: str, **sections: Any) -> dict[str, Any]:
    return {"method": {"name": name}, **sections}


CLIENT, RECORD = {"unit": "client"}, {"unit": "record"}
SECURE = {"secure_sum": True}
# What is refused, words of the sentence, and the nearest settings that are not refused.
REFUSED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (of("ridge", federation={"robust": "median"}), "adds up statistics, for which there is no other rule", of("ridge")),
    (of("ridge", federation={"one_step": True}), "has no training steps", of("linear", federation={"one_step": True})),
    (
        of("ridge", federation={"sequential": True}),
        "has no training steps",
        of("linear", federation={"sequential": True}),
    ),
    (
        of("ridge", federation={"attack": "scaled:0.2"}),
        "The attack scaled changes the update of a client",
        of("ridge", federation={"attack": "label-flip:0.2"}),
    ),
    (of("centralised", federation=SECURE), "sends no updates that could be summed", of("linear", federation=SECURE)),
    (of("zero-shot", federation=SECURE), "sends no updates that could be summed", of("zero-shot")),
    (
        of("fed-mp", federation=SECURE),
        "of each client, so that a sum is not enough.*method.merging=summed",
        {"method": {"name": "fed-mp", "merging": "summed"}, "federation": SECURE},
    ),
    (
        {"method": {"name": "fedpp", "counts": "sent"}, "federation": SECURE},
        "needs the report of each client; use --set method.counts=summed",
        {"method": {"name": "fedpp", "counts": "summed"}, "federation": SECURE},
    ),
    (
        of("linear", federation=SECURE | {"least_clients": 4}, data={"clients": 3}),
        "A sum of 3 clients is too few",
        of("linear", federation=SECURE | {"least_clients": 3}, data={"clients": 3}),
    ),
    (
        of("linear", federation=SECURE | {"withdrawn": [1]}, data={"clients": 3}),
        "A sum of 2 clients is too few",
        of("linear", federation=SECURE | {"withdrawn": [1]}, data={"clients": 4}),
    ),
    (
        of("linear", federation={"withdrawn": [3]}, data={"clients": 3}),
        "There is no client 3 to withdraw; clients are 0 to 2",
        of("linear", federation={"withdrawn": [2]}, data={"clients": 3}),
    ),
    (
        of("linear", federation={"withdrawn": [1, 1]}, data={"clients": 3}),
        "names a client twice",
        of("linear", federation={"withdrawn": [1, 0]}, data={"clients": 3}),
    ),
    (of("linear", federation={"withdrawn": [0, 1]}, data={"clients": 2}), "All clients have withdrawn", of("linear")),
    (
        of(
            "linear",
            data={"clients": 3, "newcomers": 2},
            federation={"withdrawn": [0]},
            evaluation={"protocol": "personal"},
        ),
        "Of 3 clients 2 newcomers leave none",
        of(
            "linear",
            data={"clients": 3, "newcomers": 1},
            federation={"withdrawn": [0]},
            evaluation={"protocol": "personal"},
        ),
    ),
    (
        of("linear", data={"clients": 3, "newcomers": 1}),
        "Newcomers are tested on their own images",
        of("linear", data={"clients": 3, "newcomers": 2}, evaluation={"protocol": "personal"}),
    ),
    (
        of(
            "linear",
            data={"clients": 4, "newcomers": 1},
            federation={"withdrawn": [3]},
            evaluation={"protocol": "personal"},
        ),
        "A newcomer cannot have withdrawn",
        of(
            "linear",
            data={"clients": 4, "newcomers": 1},
            federation={"withdrawn": [2]},
            evaluation={"protocol": "personal"},
        ),
    ),
    (
        of("linear", federation=SECURE | {"robust": "median"}),
        "A rule needs the update of each client",
        of("linear", federation={"robust": "median"}),
    ),
    (
        of("fedpp", federation={"attack": "label-flip:0.2"}),
        "trains without labels, so that none can be flipped",
        of("linear", federation={"attack": "label-flip:0.2"}),
    ),
    (
        of("linear", federation={"attack": "backdoor:0.2"}, evaluation={"protocol": "base-to-new"}),
        "A backdoor is planted in images, for a class that is queried",
        of("linear", federation={"attack": "backdoor:0.2"}),
    ),
    (
        of("linear", federation=SECURE | {"sequential": True}),
        "Clients that go on from each other all send the same",
        of("linear", federation={"sequential": True}),
    ),
    (
        of("linear", federation={"sequential": True, "robust": "median"}),
        "Clients that go on from each other all send the same",
        of("linear", federation={"robust": "median"}),
    ),
    (of("linear", federation={"patience": 2}), "needs images to judge rounds by", of("linear")),
    (
        of("linear", evaluation={"validation": 0.2}, privacy=CLIENT),
        "The best round on clients' own images is not private",
        of("linear", evaluation={"validation": 0.2}, federation={"patience": 2}),
    ),
    (
        of("linear", privacy=RECORD | {"subspace": 8}),
        "A public subspace is for the updates of clients",
        of("linear", privacy=CLIENT | {"subspace": 8}),
    ),
    (of("linear", data={"unit": "patient"}), "--unit patient is for record-level privacy", of("linear")),
    (
        of("linear", data={"unit": "patient"}, privacy=RECORD, evaluation={"protocol": "base-to-new"}),
        "The base-to-new protocol deals classes to clients",
        of("linear", data={"unit": "patient"}, privacy=RECORD),
    ),
    (of("centralised", privacy=CLIENT), "sends no updates that noise could be added to", of("centralised")),
    (of("fed-mp", privacy=CLIENT), "besides its update, which noise does not cover", of("fed-mp")),
    (
        of("fedmsplit-p", privacy=CLIENT),
        "client-level privacy hides each client",
        of("promptfl", privacy=CLIENT),
    ),
    (
        of("linear", data={"labels": "cps"}, privacy=CLIENT),
        "Pseudo-labels of 'cps' follow from class counts",
        of("linear", data={"labels": "fpl"}, privacy=CLIENT),
    ),
    (
        of("linear", privacy=CLIENT, federation={"robust": "median"}),
        "A rule weighs clients by one another",
        of("linear", privacy=CLIENT),
    ),
    (
        of("linear", privacy=CLIENT, federation={"drift": True}),
        "The drift of single clients",
        of("linear", federation={"drift": True}),
    ),
    (
        of("promptfl", privacy=CLIENT | {"subspace": 8}),
        "shares no vectors that are compared with image features",
        of("fst-cbdg", privacy=CLIENT | {"subspace": 8}),
    ),
    (
        of("linear", privacy=CLIENT, federation=SECURE),
        "clients cut their own updates; say to what norm",
        of("linear", privacy=CLIENT | {"clip": 0.1}, federation=SECURE),
    ),
    (
        of("linear", privacy=CLIENT | {"clip": 0.1}, federation=SECURE | {"per_round": 9}),
        "a secure sum could have too few",
        of("linear", privacy=CLIENT | {"clip": 0.1}, federation=SECURE | {"per_round": 10}),
    ),
    (
        of("fed-em", data={"labels": "upl"}, privacy=RECORD),
        "Pseudo-labels of 'upl' depend on other images",
        of("fed-em", data={"labels": "upl"}, privacy=CLIENT),
    ),
    (
        of("ridge", privacy=RECORD | {"clip": 1.0}),
        "by a known norm; leave clip out",
        of("ridge", privacy=CLIENT | {"clip": 1.0}),
    ),
    (
        of("ridge", privacy=CLIENT | {"subspace": 4}),
        "sends no updates; leave privacy.subspace out",
        of("ridge", privacy=CLIENT),
    ),
    (
        of("ridge", data={"unit": "patient"}, privacy=RECORD),
        "The images of one patient add more to the statistics",
        of("ridge", privacy=RECORD),
    ),
    (
        of("linear", data={"labels": "upl"}, privacy=RECORD),
        "Pseudo-labels of 'upl' compare the images of a client",
        of("linear", data={"labels": "zero-shot"}, privacy=RECORD),
    ),
    (
        of("fst-cbdg", privacy=RECORD),
        "an image counts in the loss or label of other images",
        of("linear", privacy=RECORD),
    ),
]


@pytest.mark.parametrize(
    ("settings", "sentence", "nearest"), REFUSED, ids=[sentence[:40] for _, sentence, _ in REFUSED]
)
def test_settings_that_do_not_fit_are_refused_and_their_nearest_are_not(
    settings: dict[str, Any], sentence: str, nearest: dict[str, Any]
) -> None:
    with pytest.raises(FedVLError, match=sentence):
        checked(settings)
    checked(nearest)


def test_between_machines_there_is_no_validation_and_no_public_subspace() -> None:
    checked(of("linear", evaluation={"validation": 0.2}))
    with pytest.raises(FedVLError, match="Images that parties hold out do not leave them"):
        checked(of("linear", evaluation={"validation": 0.2}), simulated=False)
    checked(of("linear", privacy=CLIENT | {"subspace": 8}))
    with pytest.raises(FedVLError, match="come from images of the server's own"):
        checked(of("linear", privacy=CLIENT | {"subspace": 8}), simulated=False)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (of("linear"), "centred-clipping"),
        (of("linear", data={"clients": 2}), "mean"),
        (of("linear", federation={"per_round": 2}), "mean"),
        (of("linear", federation=SECURE), "mean"),
        (of("linear", federation={"sequential": True}), "mean"),
        (of("linear", privacy=CLIENT), "mean"),
        (of("fed-mp"), "mean"),
        (of("ridge"), "mean"),
        (of("zero-shot"), "mean"),
    ],
)
def test_the_rule_between_machines_is_that_of_averaged_updates_of_three_clients(
    settings: dict[str, Any], rule: str
) -> None:
    experiment = resolve_experiment(settings)
    assert rule_between_machines(load_method(experiment.method.name), experiment) == rule


def test_notes_on_what_one_hostile_client_can_ruin() -> None:
    def notes(name: str, **sections: Any) -> tuple[str, bool]:
        experiment = resolve_experiment(of(name, **sections))
        return rule_note(experiment), bool(statistics_note(experiment))

    assert notes("ridge") == (
        "Statistics are added up, which one hostile client can ruin; no rule applies to them.",
        True,
    )
    assert not notes("ridge", federation=SECURE)[1]
    assert not notes("ridge", privacy=RECORD)[1]
    assert notes("ridge", privacy=CLIENT)[1]
    assert notes("linear", federation=SECURE)[0].startswith("With secure aggregation")
    assert notes("linear")[0].startswith("Updates are merged by the mean")
    assert notes("linear", federation={"robust": "median"}) == (
        "Updates are merged by median, against hostile clients; see docs/robust.md.",
        False,
    )


def test_a_model_is_of_the_kind_that_a_method_was_written_for() -> None:
    plain, missing = resolve_experiment(of("linear")), resolve_experiment(of("linear", data={"missing": "both:0.5"}))
    for fused, wants, experiment, sentence in (
        (False, True, plain, "needs a fused model"),
        (True, False, plain, "needs a CLIP-like model"),
        (False, False, missing, "reads images alone"),
        (False, False, resolve_experiment(of("linear", evaluation={"protocol": "missing"})), "reads images alone"),
        (True, True, resolve_experiment(of("linear", data={"labels": "upl"})), "Pseudo-labels need a CLIP-like model"),
    ):
        with pytest.raises(FedVLError, match=sentence):
            check_model(fused, wants, experiment)
    for fused, experiment in ((False, plain), (True, plain), (True, missing)):
        check_model(fused, fused, experiment)


def test_several_datasets_need_labels_and_a_protocol_that_knows_them() -> None:
    dataset: Any = SimpleNamespace(origins=("pets", "food"))
    linear, fedpp = load_method("linear"), load_method("fedpp")
    check_united(dataset, linear, resolve_experiment(of("linear")))
    for method, experiment, sentence in (
        (linear, of("linear", evaluation={"protocol": "open"}), "The open protocol is for one dataset"),
        (linear, of("linear", data={"labels": "upl"}), "would be of classes of all datasets"),
        (fedpp, of("fedpp"), "would be of classes of all datasets"),
    ):
        with pytest.raises(FedVLError, match=sentence):
            check_united(dataset, method, resolve_experiment(experiment))
        check_united(SimpleNamespace(origins=()), method, resolve_experiment(experiment))  # type: ignore[arg-type]


def test_ten_thousand_classes_are_the_most() -> None:
    check_classes(SimpleNamespace(name="names", class_names=range(10_000)))  # type: ignore[arg-type]
    with pytest.raises(FedVLError, match="'names' has 10,001 classes, more than 10,000"):
        check_classes(SimpleNamespace(name="names", class_names=range(10_001)))  # type: ignore[arg-type]


class Consulting(Method):
    """Sends reports before a round, and no updates."""

    def consultation(self) -> Selection:
        return Selection(lambda index, tensors, inputs: torch.empty(0), classes=4, clients=2, interval=1, shares=True)


def test_reports_alone_can_have_the_noise_of_clients_and_no_other() -> None:
    method = Consulting(Consulting.options_type(), small_task())
    check_method(method, resolve_experiment({"privacy": {"unit": "client"}}))
    with pytest.raises(FedVLError, match="sends no updates that noise could be added to"):
        check_method(method, resolve_experiment({"privacy": {"unit": "record"}}))
