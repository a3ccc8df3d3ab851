"""Turning names into the sentences that the text tower is trained on."""

import random
import re

from tools.pretrain.concepts import Concept

TEMPLATES = (
    "a photo of a {}",
    "a photo of the {}",
    "a photo of one {}",
    "a picture of a {}",
    "an image of a {}",
    "a {}",
    "the {}",
    "a photo of a small {}",
    "a photo of a large {}",
    "a close-up photo of a {}",
    "a blurry photo of a {}",
    "a low resolution photo of a {}",
    "a cropped photo of a {}",
    "a bright photo of a {}",
    "a dark photo of a {}",
    "a good photo of a {}",
    "a bad photo of a {}",
    "a photo of many {}",
    "a pixelated photo of a {}",
    "a photo of my {}",
    "a photo of a nice {}",
    "there is a {} in the scene",
    "a jpeg photo of a {}",
    "a black and white photo of a {}",
    "a photo of a {} outdoors",
    "a photo of a {} indoors",
    "a photo of a {} on a table",
    "a centered photo of a {}",
    "this is a {}",
    "a photo showing a {}",
    "itap of a {}",
    "a snapshot of a {}",
    "a thumbnail of a {}",
    "a photo of {}",
    "{} in the picture",
    "a view of a {}",
)
ADJECTIVE_TEMPLATES = ("a photo of something {}", "a {} thing", "a {} texture", "a photo of a {} object")


def clean(gloss: str) -> str:
    """A gloss without its remarks in brackets."""
    return re.sub(r"\s+", " ", re.sub(r"\([^)]*\)", " ", gloss)).strip()


def fill(template: str, name: str, generator: random.Random) -> str:
    """Mostly the fixed "a" of CLIP's prompts, sometimes the grammatical article."""
    if "a {}" in template and name[:1] in "aeiou" and generator.random() < 0.4:
        template = template.replace("a {}", "an {}")
    return template.format(name)


def describe(concept: Concept, generator: random.Random) -> str:
    """One random sentence for a concept: plain prompt, bare name, name with its kind, gloss, or any template."""
    name = generator.choice(concept.names if generator.random() < 0.4 else concept.names[:1]).lower()
    draw = generator.random()
    kind = generator.choice(concept.parents).lower() if concept.parents else None
    if draw < 0.20:
        return fill("a photo of a {}", name, generator)
    if draw < 0.38:
        return name
    if draw < 0.50 and kind:
        with_kind = (
            "a photo of a {}, a kind of " + kind,
            "{}, a type of " + kind,
            "a {} which is a " + kind,
            "a photo of a {} " + kind,
            "{} " + kind,
        )
        return fill(generator.choice(with_kind), name, generator)
    if draw < 0.58 and concept.gloss:
        gloss = clean(concept.gloss)
        return f"{name}: {gloss}" if generator.random() < 0.6 else gloss
    return fill(generator.choice(TEMPLATES), name, generator)
