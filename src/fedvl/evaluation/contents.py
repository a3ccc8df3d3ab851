"""Parts of result.json that an evaluation builds: conditions, candidate sets and a long tail."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedvl.config import MAX_CLIENTS
from fedvl.files import Bounds, Content, Count, Finite, Number, same_lengths

Right = Annotated[str, Field(pattern="^[01-]*$")]  # a letter for each test image
SetName = Literal["own", "local", "base", "new", "hm3", "hm2", "cm"]
GroupName = Literal["many", "medium", "few"]


class Condition(Content):
    """The test under one condition of missing modalities, in percent."""

    condition: str
    """Name of the condition."""
    accuracy: Number | None
    """Accuracy, in percent."""
    macro_f1: Number | None = None
    """Mean F1 score over classes, in percent."""
    macro_f1_interval: Bounds | None = None
    """95 % interval of macro_f1, in percent."""


class ShareBin(Content):
    """Test images whose predicted class has about this share."""

    share: Number
    """Mean share of the predicted class, in percent."""
    right: Number
    """Images that are right, in percent."""
    images: Count
    """Number of images."""


class SureAnswers(Content):
    """The test if answers below a share are left to a person."""

    least: Number
    """Share below which an answer is unsure, between 0 and 1."""
    unsure: Number
    """Answers that are unsure, in percent."""
    images: Count
    """Number of the other answers."""
    accuracy: Number | None
    """Accuracy of the other answers, in percent; null if there are none."""


class SetFigure(Content):
    """Base-to-new figure in percent: of a candidate set, or a mean of several."""

    name: SetName
    """Candidate set, or mean of several."""
    accuracy: Finite
    """Accuracy, in percent."""
    interval: Bounds
    """95 % interval of accuracy, in percent."""
    zero_shot_accuracy: Finite | None = None
    """Accuracy of the pretrained model, in percent."""
    zero_shot_interval: Bounds | None = None
    """95 % interval of zero_shot_accuracy, in percent."""


class SetsRight(Content):
    """Per-image correctness in the base-to-new protocol; shares of models in thousandths."""

    owner: list[Annotated[int, Field(ge=-1, lt=MAX_CLIENTS)]]
    """Client of each image of a base class; -1 without a client."""
    own: Right
    """A letter for each of them, asked among the client's classes: 1 correct, 0 wrong, - not asked."""
    local: Right
    """The same, asked among all base classes."""
    base: list[Annotated[int, Field(ge=0, le=1000)]]
    """Thousandths of the models that are correct on each of them."""
    new: list[Annotated[int, Field(ge=0, le=1000)]]
    """Thousandths of the models that are correct on each image of a new class."""

    @model_validator(mode="after")
    def lengths_agree(self) -> Self:
        same_lengths(owner=self.owner, own=list(self.own), local=list(self.local), base=self.base)
        return self


class TailGroup(Content):
    """Classes of a long tail with about as many training images; accuracies in percent."""

    name: GroupName
    """Name of the group."""
    classes: list[Count]
    """Numbers of its classes."""
    training_images: Count
    """Number of its training images."""
    test_images: Count
    """Number of its test images."""
    accuracy: Finite | None = None
    """Accuracy on them, in percent."""
    zero_shot_accuracy: Finite | None = None
    """Accuracy of the pretrained model on them, in percent."""


class LongTail(Content):
    """The groups of a long tail, and how they were cut."""

    by: str
    """How the groups were cut."""
    groups: Annotated[list[TailGroup], Field(max_length=3)]
    """The groups."""
