import inspect

import typer
from typer.testing import CliRunner

import fedvl
from fedvl.commands.flags import with_flags
from fedvl.commands.run import run
from fedvl.config import FLAGS, Experiment, PrivacyConfig, field_help, setting_field, setting_names


def invoked(*words):
    """Return what a command with three flags is called with."""
    calls = []
    app = typer.Typer()

    @app.command()
    @with_flags("clients", "secure_sum", "dropout")
    def command(name: str, quiet: bool = False, **flags: object) -> None:
        calls.append({"name": name, "quiet": quiet, **flags})

    outcome = CliRunner().invoke(app, words)
    return calls[0] if calls else outcome.output


def test_flags_have_the_types_of_their_settings_and_are_none_if_not_given():
    assert invoked("x") == {"name": "x", "quiet": False, "clients": None, "secure_sum": None, "dropout": None}
    given = invoked("x", "--clients", "3", "--secure-sum", "--dropout", "0.5", "--quiet")
    assert given == {"name": "x", "quiet": True, "clients": 3, "secure_sum": True, "dropout": 0.5}
    assert "not a valid int" in invoked("x", "--clients", "many")
    assert "No such option" in invoked("x", "--no-secure-sum")
    assert "No such option" in invoked("x", "--rounds", "3")


def test_every_flag_is_a_setting_or_a_section():
    assert {setting for setting in FLAGS.values() if setting not in setting_names(Experiment)} == {"privacy"}
    assert setting_field("privacy") is Experiment.model_fields["privacy"]
    assert PrivacyConfig.model_fields["clip"] is setting_field("privacy.clip")


def test_the_command_and_the_function_have_the_same_flags_with_the_same_help():
    theirs = inspect.signature(run).parameters
    ours = inspect.signature(fedvl.run).parameters
    for flag, setting in FLAGS.items():
        assert theirs[flag].annotation.__metadata__[0].help == field_help(setting_field(setting))
        assert theirs[flag].default is ours[flag].default is None
        assert f"- ``{flag}``: {field_help(setting_field(setting))}" in str(fedvl.run.__doc__)
    assert str(ours["clients"].annotation) == "int | None"
    assert ours["privacy"].annotation == str | None
    assert list(ours)[-1] == "settings"
