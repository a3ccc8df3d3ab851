"""The contract: how much there is of it, closed forms of one class alone, and what the server is shown."""

import inspect

import pytest
import torch
from helpers.small import drawn, run_quietly, small_batch, small_federation, small_method

from fedvl.errors import FedVLError
from fedvl.federation.merging import merge
from fedvl.methods import load_method, method_names
from fedvl.methods.base import CHOICES, CLOSED_FORMS, Batch, Method, Update, closed_form_of, overrides
from fedvl.methods.linear import Linear
from fedvl.methods.parts.losses import masked_mean
from fedvl.methods.roles import Private, Shared
from fedvl.tensors import digest

HELPERS = {
    "options_type",
    "scale",
    "role",
    "clusters",
    "tailor",
    "first_private",
    "first_shared",
}  # what follows from hooks and declarations


def public(kind):
    return {name: value for name, value in vars(kind).items() if not name.startswith("_") and name not in HELPERS}


def test_there_are_at_most_nineteen_hooks_and_twelve_declarations():
    hooks = {name for name, value in public(Method).items() if callable(value) or isinstance(value, classmethod)}
    assert len(hooks) <= 19, sorted(hooks)
    assert len(public(Method).keys() - hooks) <= 12, sorted(public(Method).keys() - hooks)


@pytest.mark.parametrize("name", method_names())
def test_methods_overwrite_nothing_that_is_final_and_mutate_no_declaration(name):
    method = small_method(name)
    for kind in type(method).__mro__[:-2]:
        assert not HELPERS - {"options_type"} & vars(kind).keys()
    declarations = public(Method).keys() - {n for n, v in public(Method).items() if inspect.isroutine(v)} - {"options"}
    own = declarations & vars(method).keys()
    assert own <= {"weighting"}, "only how clients are weighted may follow an option"
    assert method.weighting in CHOICES["weighting"]


# --- the closed form


class Pulled(Linear):
    """A user's own: the linear classifier with a term more in its loss."""

    def loss(self, tensors, batch):
        return super().loss(tensors, batch) + 0.5 * tensors["weight"].pow(2).sum()


class Bent(Linear):
    """A user's own: scores that are not linear, from which the loss follows."""

    def predict(self, tensors, inputs):
        return torch.tanh(super().predict(tensors, inputs))


class Renamed(Linear):
    """A user's own that changes nothing of the loss."""

    labels = "candidates"


@pytest.mark.parametrize("kind", [Pulled, Bent])
def test_a_subclass_with_another_loss_is_trained_by_its_own_loss(kind):
    """The closed form of ``linear`` once served its subclasses too: they trained to the very bits of ``linear``."""
    task = small_method("linear").task
    batched, alone = (
        run_quietly(small_federation(kind(kind.options_type(), task), one_by_one=one)).shared for one in (False, True)
    )
    plain = run_quietly(small_federation(small_method("linear"))).shared
    assert digest(batched) != digest(plain)
    for name in plain:
        torch.testing.assert_close(batched[name], alone[name], rtol=0, atol=1e-5)
        assert (batched[name] - plain[name]).abs().max() > 1e-3


def test_closed_forms_are_of_the_classes_that_say_so():
    packaged = {kind for kind in CLOSED_FORMS if kind.__module__.startswith("fedvl.")}
    assert packaged == {
        Linear,
        *map(load_method, ("centralised", "fedavgm", "fedadam", "fedyogi", "scaffold", "feddyn")),
    }
    assert Renamed not in CLOSED_FORMS


def test_a_declaration_that_does_not_exist_is_refused_when_the_class_is_made():
    with pytest.raises(TypeError, match=r"Wrong\.scope is 'sample'; it must be one of row, batch, client, pooled"):

        class Wrong(Method):
            scope = "sample"


# --- what the server sees


class Listening(Method):
    """``merge`` notes what it is given; only ``each`` may be there."""

    def __init__(self, options, task):
        super().__init__(options, task)
        self.seen: list[set[str]] = []

    def roles(self):
        return {"each.*": Shared(needs="each")}

    def merge(self, shared, updates):
        self.seen += [set(update.tensors) for update in updates] + [set(shared)]
        return {name: torch.stack([update.tensors[name] for update in updates]).amax(0) for name in shared}


def test_merge_is_never_given_what_the_server_needs_only_in_sum():
    method = Listening(Method.options_type(), small_method("linear").task)
    shared = {"summed": torch.zeros(2), "each.one": torch.zeros(2)}
    updates = [
        Update(client, {"summed": torch.full((2,), value), "each.one": torch.full((2,), value)}, weight)
        for client, value, weight in ((0, 1.0, 1.0), (1, 5.0, 3.0))
    ]
    merged = merge(method, shared, updates)
    assert method.seen == [{"each.one"}] * 3
    assert merged["summed"].tolist() == [4.0, 4.0]  # (1 + 3 * 5) / 4
    assert merged["each.one"].tolist() == [5.0, 5.0]


# --- rows


ROWS = [name for name in method_names() if load_method(name).scope == "row" and name != "zero-shot"]


@pytest.mark.parametrize("name", ROWS)
def test_where_rows_are_independent_the_loss_is_the_mean_of_the_rows_losses(name):
    """What per-sample clipping needs: with scope "row", no row of a batch touches another."""
    method = small_method(name)
    federation = small_federation(method)
    batch = small_batch(method, torch.arange(8, 12))  # of one client
    handed = method.hand_out(federation.shared, {}, 3)
    private = federation.engine.begun(3, handed)
    if "labels" in private:
        private["labels"] = torch.arange(len(private["labels"])) % 4
    tensors = {**handed, **private}
    received = {name: tensor * 1.1 for name, tensor in handed.items()}
    batch = batch._replace(position=torch.arange(4), received=received, noise=drawn(method))

    def row(number: int) -> Batch:
        inputs = {key: value[number : number + 1] for key, value in batch.inputs.items()}
        return batch._replace(
            inputs=inputs,
            labels=batch.labels[number : number + 1],
            mask=batch.mask[number : number + 1],
            position=batch.position[number : number + 1],
        )

    whole = method.objective(tensors, batch)[0]
    rows = torch.stack([method.objective(tensors, row(number))[0] for number in range(4)])
    torch.testing.assert_close(whole, masked_mean(rows, torch.ones(4)), rtol=1e-4, atol=1e-5)


def test_some_methods_say_that_their_rows_touch_each_other():
    said = {name: load_method(name).scope for name in ("fed-mp", "fedclip", "fst-cbdg", "fedavg-nn", "centralised")}
    assert said == {
        "fed-mp": "batch",
        "fedclip": "batch",
        "fst-cbdg": "client",
        "fedavg-nn": "batch",
        "centralised": "pooled",
    }


def test_a_method_that_would_draw_its_own_noise_is_told_so_when_it_is_loaded():
    with pytest.raises(TypeError, match="noise draws nothing itself"):
        type("Drawing", (Method,), {"noise": lambda self, generator: {}})


def old(tensors, samples):
    return 0


@pytest.mark.parametrize("role", [{"begin": old}, {"end": old}])
def test_a_function_of_a_role_with_other_arguments_is_refused(role):
    class Old(Linear):
        def roles(self):
            return {"own": Private(**role)}

    with pytest.raises(
        FedVLError, match=r"of 'own' in Old must take the arguments \(name, tensors, received, samples\)"
    ):
        assert Old(Old.options_type(), small_method("linear").task).role


# --- a loss that was replaced is the one that is trained


def shrinking(self_or_tensors, *rest):
    """A loss that shrinks the weights, as a function of a class or of an object."""
    tensors = rest[0] if len(rest) == 2 else self_or_tensors
    return tensors["weight"].square().sum()


def trained_with(method):
    return run_quietly(small_federation(method)).shared["weight"]


@pytest.mark.parametrize("hook", ["loss", "objective", "predict"])
@pytest.mark.parametrize("on", ["class", "object"])
def test_a_replaced_hook_of_the_loss_is_trained_by(monkeypatch, on, hook):
    """A patch of ``Linear.loss`` was once passed over in silence: its closed form trained instead."""
    method, plain = small_method("linear"), trained_with(small_method("linear"))
    replaced = {
        "loss": shrinking,
        "objective": lambda *given: (shrinking(*given), {}),
        "predict": lambda *given: (
            (given[-2]["weight"].square().sum() + 0 * given[-1]["features"])[:, :1] * torch.arange(10.0)
        ),
    }[hook]
    monkeypatch.setattr(Linear if on == "class" else method, hook, replaced)
    assert closed_form_of(method) is None
    alone = run_quietly(small_federation(method, one_by_one=True)).shared["weight"]
    torch.testing.assert_close(trained_with(method), alone, rtol=0, atol=1e-5)
    assert (alone - plain).abs().max() > 1e-3


def test_a_loss_that_is_replaced_between_two_rounds_is_trained_by_from_then_on(monkeypatch):
    method = small_method("linear")
    federation = small_federation(method, rounds=2)
    norms = []

    def after_round(record):
        norms.append(float(federation.shared["weight"].norm()))
        method.loss = shrinking

    federation.run(after_round=after_round)
    assert norms[1] < norms[0]


def test_a_class_that_has_its_own_loss_cannot_say_that_it_is_another_ones():
    with pytest.raises(TypeError, match="Both has its own predict or loss or objective; leave out same_loss_as=Linear"):

        class Both(Linear, same_loss_as=Linear):
            def loss(self, tensors, batch):
                return super().loss(tensors, batch) * 2


def test_a_hook_on_the_object_is_one_of_its_own():
    method = small_method("linear")
    assert not overrides(method, "correct")
    assert overrides(method, "predict")
    method.correct = lambda gradients, tensors, received: gradients
    assert overrides(method, "correct")
