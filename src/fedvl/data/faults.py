"""The faults that a check of images knows: what each is called, and how it is fixed."""

from typing import NamedTuple

from fedvl.files import Content, Count

MAX_NAMED = 50  # files of a fault that are named


class FaultKind(NamedTuple):
    """A kind of fault."""

    title: str
    fix: str


FAULT_KINDS = {
    "unreadable": FaultKind("files that cannot be read", "Replace them by whole copies, or remove them."),
    "left-out": FaultKind(
        "files that are not used",
        "Convert them to JPEG or PNG, give them an extension, or move them into class folders.",
    ),
    "empty-class": FaultKind("class folders without images", "Add images, or remove the folder."),
    "rare-class": FaultKind("classes with few images", "Add images, or join the class with another one."),
    "untested-class": FaultKind(
        "classes without test images", "Move some images of the class to the test, else nothing is known of it."
    ),
    "similar-names": FaultKind(
        "class names that probably mean the same", "Choose one spelling, and rename the folders or labels."
    ),
    "numbered-names": FaultKind("class names that are numbers", "Call the classes by words: the model reads them."),
    "duplicate": FaultKind("files that are there more than once", "Keep one of each."),
    "conflict": FaultKind("the same image in two classes", "Find out which label is right, and remove the other copy."),
    "leak": FaultKind(
        "the same image for training and test", "Remove it from the training images: the test would be too good."
    ),
    "near-duplicate": FaultKind(
        "images that are nearly the same",
        "Keep one of each, or keep all of a group either for training or for the test.",
    ),
    "unit-split": FaultKind(
        "patients (or cases) in training and test",
        "Keep all images of one patient either for training or for the test.",
    ),
    "blank": FaultKind("images of one colour", "Export them again, or remove them."),
    "exposure": FaultKind(
        "images that are nearly black or white", "Export them again with another window or exposure."
    ),
    "dim": FaultKind(
        "images whose values use a small part of 16 bits",
        "Scale them to the whole range: 12 bits in a 16-bit file are read as nearly black.",
    ),
    "small": FaultKind("images that are very small", "Export them in full size; thumbnails tell the model little."),
    "shortcut": FaultKind(
        "a class that is known by its files",
        "Export all classes in the same way: a model would learn the difference of the files, not of the findings.",
    ),
    "labels": FaultKind(
        "classes whose labels the pretrained model cannot confirm",
        "Look at some images of the class: its labels may be of other images, or its name says little.",
    ),
    "exchanged": FaultKind(
        "classes that seem to be exchanged", "Look at some images of both, and exchange the folders or labels."
    ),
    "turned": FaultKind("images that seem to lie on their side or head", "Turn them, or repair the export."),
    "inverted": FaultKind(
        "images that seem to be negatives", "Invert them, or repair the export (MONOCHROME1 in DICOM)."
    ),
}
NAMES = tuple(FAULT_KINDS)


class Fault(NamedTuple):
    """A fault: a sentence, and the rows of the images that it concerns."""

    kind: str
    sentence: str
    rows: tuple[int, ...] = ()


class ShownFault(Content):
    """A fault as it is shown: with the names of files, and what to do."""

    kind: str
    title: str
    sentence: str
    fix: str
    images: Count
    files: list[str]
