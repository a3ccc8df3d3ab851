"""What one unit moves: every method, protocol and choice of options that --privacy accepts, and all else is refused."""

import pytest
from helpers.sensitivity import CHANGES, MOST, UNITS, Setting, refusal, sensitivity, settings_of

from fedvl.errors import FedVLError
from fedvl.methods import load_method, method_names
from fedvl.methods.fed_em import FedEM
from fedvl.runs import requirements

# of which some accept and some refuse; all others are found by themselves
ACCEPTED = {
    ("linear", "client"),
    ("linear", "record"),
    ("cachefl", "record"),
    ("fst-cbdg", "client"),
    ("fedtpg", "client"),
    *((method, unit) for method in ("ridge", "gda", "fed-em") for unit in UNITS),
}
REFUSED = {("zero-shot", "client"), ("fed-mp", "record"), ("fst-cbdg", "record")}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("method", method_names())
def test_one_unit_moves_the_sum_by_the_clip_and_nothing_else(method, unit):
    plain, largest = Setting(method, unit), list[float]()
    for setting in settings_of(method, unit):
        reason = refusal(setting)
        if reason is not None:
            assert reason.endswith((".", "?")), reason
            assert "\n" not in reason
            continue
        for change in CHANGES if setting == plain else CHANGES[:1]:
            found = sensitivity(setting, change)
            assert found.moved <= MOST, f"{setting.words}: one unit that {change} moves {found.moved:.3f} clips"
            assert found.uncovered == [], f"{setting.words}: without noise leaves {', '.join(found.uncovered[:3])}"
            largest.append(found.moved)
    # an image that belongs to several classes by shares moves their sums by less than one of a single class
    least = 0.3 if load_method(method).statistics is FedEM.statistics else 0.5
    assert not largest or max(largest) > least, "nothing was clipped, so that nothing was measured"
    assert not (largest and (method, unit) in REFUSED)
    assert largest or (method, unit) not in ACCEPTED


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        (Setting("fedtpg", "record"), "use --set method.classes=all."),
        (Setting("linear", "record", several=True), "use one dataset, or --protocol base-to-new"),
        (Setting("linear", "record", "personal", several=True), "use one dataset, or --protocol base-to-new"),
        (Setting("promptfl", "record", "base-to-new", data=(("client_shots", 1),)), "leave it out"),
        (Setting("promptfl", "client", data=(("labels", "cps"),)), "--set data.labels=fpl"),
    ],
    ids=lambda value: value.words if isinstance(value, Setting) else "",
)
def test_what_is_refused_would_change_what_others_add(setting, remedy, monkeypatch):
    """The refusals are of use, and the measurement sees what they refuse."""
    with pytest.raises(FedVLError, match=remedy):
        sensitivity(setting, CHANGES[0])
    for check in ("check_record_privacy", "check_private_choice", "check_client_privacy"):
        monkeypatch.setattr(requirements, check, lambda *_: None)
    assert sensitivity(setting, "adds a new class").uncovered


def test_images_of_one_patient_move_a_sum_farther_than_one_image_may(monkeypatch):
    """Without --unit three images count three times; with it, as one."""
    by_patient = Setting("linear", "record", unit_column=True)
    assert sensitivity(by_patient, "adds to a class").moved <= MOST
    monkeypatch.setattr("fedvl.federation.steps.UNIT", "nothing")
    assert sensitivity(by_patient, "adds to a class").moved > 1.5


@pytest.mark.parametrize("labels", ["zero-shot", "upl", "fpl", "cpl"])
def test_pseudo_labels_of_each_client_alone_move_nothing_else(labels):
    found = sensitivity(Setting("promptfl", "client", data=(("labels", labels),)), CHANGES[0])
    assert found.moved <= MOST
    assert found.uncovered == []
