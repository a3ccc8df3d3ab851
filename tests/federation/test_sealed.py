"""Hooks that read a client's samples outside the loss are found, whatever they make of them."""

from typing import get_args

import pytest
import torch
from helpers.small import small_method, small_task

from fedvl.federation.sealed import SamplesReadError, Sealed, alternatives, made_of_samples
from fedvl.methods.base import Method, Options
from fedvl.methods.roles import Private
from fedvl.seeding import torch_generator

HOOKS = {
    "first": {"own": Private(first=lambda samples: samples.labels.max())},
    "begin": {"own": Private(begin=lambda name, tensors, received, samples: samples.inputs["features"].mean(0))},
    "end": {"own": Private(end=lambda name, tensors, received, samples: samples.take(torch.arange(1)).labels)},
    "join": {},
}


class Curious(Method):
    """Whose hook ``reads`` looks at samples."""

    reads = ""

    def roles(self):
        return (
            HOOKS[self.reads]
            if self.reads
            else {"own": Private(begin=lambda name, tensors, received, samples: tensors["w"])}
        )

    def start(self, generator):
        return {"w": torch.zeros(2)}

    def join(self, samples, generator):
        return {"seen": samples.labels.bincount()} if self.reads == "join" else {"n": torch.tensor(len(samples))}

    def predict(self, tensors, inputs):
        return inputs["features"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_reads_samples_is_named(hook):
    method = Curious(Options(), small_task())
    method.reads = hook
    made = made_of_samples(method, method.start(torch.Generator()))
    assert made == ("a client's private tensors" if hook == "join" else "'own'")


def test_hooks_that_count_samples_or_read_tensors_are_not():
    method = Curious(Options(), small_task())
    assert made_of_samples(method, method.start(torch.Generator())) is None


def test_sealed_samples_are_counted_and_nothing_else():
    sealed = Sealed()
    assert len(sealed) == 2
    for read in (lambda: sealed.labels, lambda: sealed.inputs, lambda: sealed.take(torch.arange(1))):
        with pytest.raises(SamplesReadError):
            read()


def test_an_option_that_helps_is_among_the_alternatives():
    method = small_method("fedtpg")
    start = method.start(torch_generator(0, "start"))
    assert made_of_samples(method, start) == "a client's private tensors"
    assert [choice for choice, other in alternatives(method) if made_of_samples(other, start) is None] == [
        "classes=all"
    ]


def test_alternatives_are_the_other_words_of_an_option():
    method = small_method("fed-mp")
    found = {choice: getattr(other.options, choice.partition("=")[0]) for choice, other in alternatives(method)}
    assert all(choice == f"{choice.partition('=')[0]}={value}" for choice, value in found.items())
    assert f"merging={method.options.merging}" not in found
    assert {choice for choice in found if choice.startswith("merging=")} == {
        f"merging={word}"
        for word in get_args(type(method.options).model_fields["merging"].annotation)
        if word != method.options.merging
    }
    numbers = [name for name, value in method.options.model_dump().items() if not isinstance(value, str)]
    assert not [choice for choice in found if choice.partition("=")[0] in numbers]
