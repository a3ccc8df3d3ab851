import pytest

from fedvl.methods import load_method, method_names
from fedvl.methods.fedprox import FedProxOptions
from fedvl.methods.fst_cbdg import FSTOptions
from fedvl.methods.show import describe_option, show_method


def test_the_comment_beside_an_option_is_its_help():
    assert describe_option(FSTOptions, "trade_off", float) == "lambda of eq. 8"
    update = FSTOptions.model_fields["update"].annotation
    assert describe_option(FSTOptions, "update", update) == "one of client, batch; whose pseudo-labels a step renews"


def test_an_inherited_option_is_explained_where_it_was_defined():
    assert "logit scale" in describe_option(FedProxOptions, "scale", FedProxOptions.model_fields["scale"].annotation)


@pytest.mark.parametrize("name", method_names())
def test_every_method_can_be_shown(name, capsys):
    show_method(name)
    shown = capsys.readouterr().out
    assert all(f"method.{key}" in shown for key in load_method(name).options_type.model_fields)
    assert "preset paper" in shown
