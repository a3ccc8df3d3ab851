"""What one unit moves: every method, protocol and choice of options that --privacy accepts, and all else is refused."""

import pytest
from helpers.sensitivity import CHANGES, ROUNDING, UNITS, Setting, refusal, sensitivity, settings_of

from fedvl import requirements
from fedvl.errors import FedVLError
from fedvl.methods import method_names

# of which some accept and some refuse; all others are found by themselves
ACCEPTED = {
    ("linear", "client"),
    ("linear", "record"),
    ("cachefl", "record"),
    ("fst-cbdg", "client"),
    ("fedtpg", "client"),
}
REFUSED = {("zero-shot", "client"), ("fed-prime", "client"), ("fed-mp", "record"), ("fst-cbdg", "record")}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("method", method_names())
def test_one_unit_moves_the_sum_by_the_clip_and_nothing_else(method, unit):
    plain, measured = Setting(method, unit), 0
    for setting in settings_of(method, unit):
        reason = refusal(setting)
        if reason is not None:
            assert reason.endswith((".", "?")), reason
            assert "\n" not in reason
            continue
        for change in CHANGES if setting == plain else CHANGES[:1]:
            found = sensitivity(setting, change)
            assert found.moved <= 1 + ROUNDING, f"{setting.words}: one unit that {change} moves {found.moved:.3f} clips"
            assert found.uncovered == [], f"{setting.words}: without noise leaves {', '.join(found.uncovered[:3])}"
            measured += 1
    if (method, unit) in ACCEPTED:
        assert measured
    if (method, unit) in REFUSED:
        assert not measured


@pytest.mark.parametrize(
    ("setting", "remedy", "least"),
    [
        (Setting("fedtpg", "record"), "use --set method.classes=all.", 1.3),
        (Setting("linear", "record", several=True), "use one dataset, or --protocol base-to-new", 1.5),
        (Setting("linear", "record", "personal", several=True), "use one dataset, or --protocol base-to-new", 1.5),
        (Setting("promptfl", "record", "base-to-new", data=(("client_shots", 1),)), "leave it out", 1.02),
    ],
    ids=lambda value: value.words if isinstance(value, Setting) else "",
)
def test_what_is_refused_would_move_the_sum_farther(setting, remedy, least, monkeypatch):
    """The refusals are of use, and the measurement sees what they refuse."""
    with pytest.raises(FedVLError, match=remedy):
        sensitivity(setting, CHANGES[0])
    for check in ("check_record_privacy", "check_private_choice"):
        monkeypatch.setattr(requirements, check, lambda *_: None)
    found = [sensitivity(setting, change) for change in CHANGES]
    assert max(each.moved for each in found) > least


def test_labels_that_clients_choose_together_are_refused_since_others_would_move(monkeypatch):
    setting = Setting("promptfl", "client", "base-to-new", data=(("labels", "cps"),))
    assert "--set data.labels=fpl" in str(refusal(setting))
    monkeypatch.setattr(requirements, "check_client_privacy", lambda *_: None)
    assert any(sensitivity(setting, change).uncovered for change in CHANGES)


@pytest.mark.parametrize("labels", ["zero-shot", "upl", "fpl", "cpl"])
def test_pseudo_labels_of_each_client_alone_move_nothing_else(labels):
    found = sensitivity(Setting("promptfl", "client", data=(("labels", labels),)), CHANGES[0])
    assert found.moved <= 1 + ROUNDING
    assert found.uncovered == []
