import pytest

from fedvl.config import field_help
from fedvl.methods import load_method, method_names
from fedvl.methods.base import CHOICES
from fedvl.methods.fedprox import FedProxOptions
from fedvl.methods.fst_cbdg import FSTOptions
from fedvl.methods.show import CLASSES, LABEL_SENTENCES, show_method


def test_the_docstring_of_an_option_is_its_help():
    fields = FSTOptions.model_fields
    assert field_help(fields["trade_off"]) == "Weight lambda of eq. 8."
    assert field_help(fields["update"]) == (
        "One of client, batch. Pseudo-labels that a step updates: the batch's, or all of the client's."
    )


def test_an_inherited_option_keeps_its_help():
    assert "logit scale" in field_help(FedProxOptions.model_fields["scale"])


@pytest.mark.parametrize("name", method_names())
def test_every_option_has_a_description_that_is_a_sentence(name):
    fields = load_method(name).options_type.model_fields
    wrong = [key for key, field in fields.items() if not (text := field.description or "")[:1] or text[-1] != "."]
    assert wrong == []


@pytest.mark.parametrize("name", method_names())
def test_every_method_can_be_shown(name, capsys):
    show_method(name)
    shown = capsys.readouterr().out
    assert all(f"method.{key}" in shown for key in load_method(name).options_type.model_fields)
    assert "preset paper" in shown


def test_every_choice_of_labels_and_classes_has_its_words():
    assert set(LABEL_SENTENCES) == set(CHOICES["labels"])
    assert set(CLASSES) == set(CHOICES["vocabulary"])


@pytest.mark.parametrize(
    ("name", "labels", "classes"),
    [
        ("linear", "one label for each image", "the classes of the run."),
        ("fed-mp", "one label for each image", "any class, by its name."),
        ("zero-shot", "nothing", "any class, by its name."),
        ("fst-cbdg", "images without labels", "the classes of the run."),
    ],
)
def test_a_method_says_what_it_trains_on_and_what_it_predicts(name, labels, classes, capsys):
    show_method(name)
    shown = capsys.readouterr().out
    assert f"Trains on {labels}." in shown
    assert f"Predicts {classes}" in shown
