"""The concept vocabulary: what the label of a training image means, and what that is a kind of.

Each label key of build_shards.py becomes one concept (its leaf) and the set of all concepts that are true of it: the
leaf and its WordNet ancestors. Concepts 0 to K-1 are the K ImageNet classes in class order, because the image teacher
speaks in these.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tools.pretrain.wordnet import WordNet

ANIMAL, PLANT, FOOD, ARTEFACT = "n00015388", "n00017222", "n07555863", "n00021939"
PHYSICAL, FRUIT_PLANT, BIRD = "n00001930", "n13134947", "n01503061"
CAR, EDIBLE_FRUIT = "n02958343", "n07705931"
TOO_GENERAL = 420  # a concept above more ImageNet classes than this ("entity", "artifact") says nothing of an image

# Caltech-101 class names that WordNet spells otherwise, or knows only as something wider.
CALTECH_WORDNET = {
    "faces": "face",
    "faces easy": "face",
    "leopards": "leopard",
    "motorbikes": "motorcycle",
    "airplanes": "airplane",
    "car side": "car",
    "cougar body": "cougar",
    "cougar face": "cougar",
    "crocodile head": "crocodile",
    "flamingo head": "flamingo",
    "binocular": "binoculars",
    "water lilly": "water lily",
    "panda": "giant panda",
    "hawksbill": "hawksbill turtle",
    "sea horse": "seahorse",
    "wild cat": "wildcat",
    "cellphone": "cellular telephone",
    "rhino": "rhinoceros",
    "inline skate": "roller skate",
    "buddha": "statue",
    "windsor chair": "chair",
    "stop sign": "street sign",
    "dollar bill": "",  # every noun "bill" that is an artefact is a wrong one
}
CALTECH_SHOWN = {
    "faces": "face",
    "faces easy": "face",
    "leopards": "leopard",
    "motorbikes": "motorbike",
    "airplanes": "airplane",
    "car side": "car",
    "water lilly": "water lily",
}
CAR_BODIES = {
    "suv": "sport utility",
    "sedan": "sedan",
    "convertible": "convertible",
    "coupe": "coupe",
    "wagon": "beach wagon",
    "van": "van",
    "minivan": "minivan",
    "cab": "pickup",
    "hatchback": "hatchback",
    "limousine": "limousine",
}
FRUIT_WORDNET = {
    "cocos": "coconut",
    "limes": "lime",
    "dates": "date",
    "kumquats": "kumquat",
    "mangostan": "mangosteen",
    "mandarine": "mandarin",
    "carambula": "carambola",
    "maracuja": "passion fruit",
    "kaki": "persimmon",
}
# "Ginger Root" stays; "Apple Golden" becomes "golden apple".
FRUIT_SECOND_WORDS = ("root", "fruit", "husk", "with husk", "forest", "pecan")


@dataclass
class Concept:
    key: str  # a WordNet id, or a label key of its own
    names: list[str]  # the first is the usual one
    gloss: str
    parents: list[str]  # names of what it is a kind of
    synset: str | None = None  # the nearest synset, for the taxonomy vector


class Vocabulary:
    def __init__(self, wordnet: WordNet, imagenet: Sequence[str], keys: Sequence[str]) -> None:
        self.wordnet = wordnet
        self.imagenet = list(imagenet)
        self.concepts: list[Concept] = []
        self.position: dict[str, int] = {}
        self.leaf: dict[str, int] = {}  # from a label key to its own concept
        self.true: dict[str, list[int]] = {}  # from a label key to all concepts that are true of it
        self.unmatched: list[str] = []  # label keys that were not found in WordNet
        below = Counter(concept for synset in self.imagenet for concept in wordnet.ancestors(synset))
        self.ignored = {concept for concept, count in below.items() if count > TOO_GENERAL}
        self.ignored |= wordnet.ancestors(FOOD) - {FOOD}
        self.ignored |= wordnet.ancestors(ANIMAL) - {ANIMAL}
        for synset in self.imagenet:
            self._of_synset(synset)
        for synset in self.imagenet:
            self.ancestors(synset)
        for key in keys:
            self._add_label(key)

    def ancestors(self, synset: str) -> list[int]:
        """Concepts of a synset and of all that it is a kind of, the over-general ones left out."""
        kept = sorted(found for found in self.wordnet.ancestors(synset) if found not in self.ignored)
        return [self._of_synset(found) for found in kept]

    def _add(self, concept: Concept) -> int:
        if concept.key not in self.position:
            self.position[concept.key] = len(self.concepts)
            self.concepts.append(concept)
        return self.position[concept.key]

    def _of_synset(self, synset: str) -> int:
        net = self.wordnet
        parents = [net.names[parent][0] for parent in net.parents[synset] if parent not in self.ignored][:2]
        return self._add(Concept(synset, net.names[synset], net.gloss[synset], parents, synset))

    def _add_label(self, key: str) -> None:
        source, _, name = key.partition(":")
        if source in ("flk", "none"):
            return
        if source == "wn":
            self.leaf[key], self.true[key] = self._of_synset(name), self.ancestors(name)
            return
        own, synset = getattr(self, f"_{source}")(name.lower().replace("_", " "))
        self.leaf[key] = own
        self.true[key] = self.ancestors(synset) if synset else []
        if synset is None:
            self.unmatched.append(key)
        if self.concepts[own].key != synset:
            self.concepts[own].synset = synset or self.concepts[own].synset
            self.true[key].append(own)
        if source == "car":
            self.true[key] += self.ancestors(CAR)
        if source == "fru" and EDIBLE_FRUIT in self.position:
            self.true[key].append(self.position[EDIBLE_FRUIT])

    def _cal(self, name: str) -> tuple[int, str | None]:
        """Caltech-101: the synset itself where it has the class's name, else a concept of its own below it."""
        base = CALTECH_WORDNET.get(name, name)
        synset = self.wordnet.find(base, [ANIMAL, PLANT, ARTEFACT, FOOD, PHYSICAL])
        shown = CALTECH_SHOWN.get(name, name)
        if synset is not None and shown in [known.lower() for known in self.wordnet.names[synset]]:
            return self._of_synset(synset), synset
        return self._add(Concept(f"cal:{shown}", [shown], "", [base] if synset else [])), synset

    def _cub(self, name: str) -> tuple[int, str]:
        """CUB-200: a species is looked up whole, then by its last word, then by its last two."""
        words = name.split()
        candidates = (name, words[-1], " ".join(words[-2:]))
        synset = next(filter(None, (self.wordnet.find(candidate, [BIRD]) for candidate in candidates)), BIRD)
        return self._add(Concept(f"cub:{name}", [name], "", ["bird", words[-1]])), synset

    def _car(self, name: str) -> tuple[int, str]:
        """Stanford Cars: the model without its year; the body style is what WordNet knows."""
        model = re.sub(r"\s*\d{4}$", "", name)
        bodies = [body for word, body in CAR_BODIES.items() if word in model.split()]
        synset = (self.wordnet.find(bodies[0], [ARTEFACT]) if bodies else None) or CAR
        names = [model, name, " ".join(model.split()[:2])]
        return self._add(Concept(f"car:{model}", names, "", ["car", "automobile", *bodies])), synset

    def _fru(self, name: str) -> tuple[int, str | None]:
        """Fruits-360: "apple golden 2" is the second lot of golden apples."""
        base = re.sub(r"\s*\d+$", "", name)
        first, _, rest = base.partition(" ")
        shown = base if rest in FRUIT_SECOND_WORDS else f"{rest} {first}".strip()
        known = FRUIT_WORDNET.get(first, first)
        synset = self.wordnet.find(base, [FOOD, FRUIT_PLANT]) or self.wordnet.find(known, [FOOD, FRUIT_PLANT])
        names = list(dict.fromkeys([shown, shown.replace(first, known), known]))
        return self._add(Concept(f"fru:{shown}", names, "", [known, "fruit"])), synset
