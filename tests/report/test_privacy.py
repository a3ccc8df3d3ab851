"""Words for a privacy budget: its unit, its neighbours, what it assumes and what it leaves out."""

from helpers.contents import result_of

from fedvl.report.privacy import beside, neighbours, not_covered, sentences, spent_on, statement

ITEM = {"name": "class counts", "keys": ["partition_counts"], "state": "not covered", "why": "A simulation knows them."}
COVERED = {"name": "model", "keys": [], "state": "covered", "why": "It is made of noisy sums."}


def private(unit="record", group=None, simulated=False, data=None, secure=False, **more):
    keys = {
        "method": "linear",
        "privacy": {
            "unit": unit,
            "epsilon": 3.0,
            "delta": 1e-5,
            "sampling": "by chance",
            "group": group,
            "simulated": simulated,
            "released": [ITEM, COVERED],
        },
        "config": {"data": data or {}, "federation": {"secure_sum": secure}},
        **more,
    }
    if simulated is None:
        del keys["privacy"]["simulated"]
    return result_of(keys)


def test_a_run_without_a_budget_has_nothing_to_say():
    assert (
        sentences(result_of({"method": "linear", "privacy": None})) == sentences(result_of({"method": "linear"})) == []
    )
    assert beside(result_of({"method": "linear"})) == []


def test_the_unit_is_a_client_an_image_or_who_the_images_are_of():
    assert spent_on(private("client")) == "client"
    assert spent_on(private()) == "image"
    by_patient = private(data={"unit": "patient"})
    assert spent_on(by_patient) == "patient"
    assert statement(by_patient) == "epsilon 3.00, delta 1e-05, of each patient; by chance"
    assert "all images of one patient at a client" in neighbours(by_patient)
    assert "with an empty one in its place" in neighbours(private())
    assert "with all images of one client, and with none" in neighbours(private("client"))


def test_several_images_of_one_person_add_up():
    assert any("k images of one person have k x epsilon" in each for each in sentences(private()))
    found = " ".join(sentences(private(group={"column": "patient", "largest": 5})))
    assert "there are up to 5, so epsilon 15." in found
    assert "With --unit patient the budget is of each patient." in found
    for other in (
        private(group={"column": "patient", "largest": 1}),
        private(group={"column": "patient", "largest": 5}, data={"unit": "patient"}),
        private("client"),
    ):
        assert "k x epsilon" not in " ".join(sentences(other))


def test_a_simulation_says_that_its_noise_is_not_secret():
    told = "in this simulation the seed is published"
    assert told in sentences(private(simulated=True))[0]
    assert told not in " ".join(sentences(private()))
    assert told in sentences(private(simulated=None))[0]  # an older run does not say
    party = {"name": "north", "bytes_up": 1, "bytes_down": 1}
    assert told not in " ".join(sentences(private(simulated=None, party="north")))
    assert told not in " ".join(sentences(private(simulated=None, parties=[party])))


def test_record_level_alone_recommends_secure_aggregation():
    assert "Add --secure-sum" in sentences(private())[-1]
    for other in (private(secure=True), private("client")):
        assert "--secure-sum" not in " ".join(sentences(other))


def test_what_is_not_covered_is_named():
    assert beside(private()) == [
        ("class counts", "not covered", "A simulation knows them."),
        ("model", "covered", "It is made of noisy sums."),
    ]
    assert not_covered(private()) == ["class counts"]
