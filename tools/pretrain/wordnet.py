"""As much of WordNet 3.0 as is needed here: nouns with their kinds (hypernyms), names, glosses and senses."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path


class WordNet:
    """Noun synsets are named as ImageNet names them: "n" and the eight digits of the offset in data.noun."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: dict[str, list[str]] = {}
        self.parents: dict[str, list[str]] = {}
        self.gloss: dict[str, str] = {}
        self.instances: set[str] = set()  # one particular thing (a town, a person) and not a kind of thing
        self.senses: dict[str, list[str]] = {}  # from a lower-case name to its synsets, the commonest sense first
        self._ancestors: dict[str, frozenset[str]] = {}
        for line in self._lines("data.noun"):
            self._read_synset(line)
        for line in self._lines("index.noun"):
            fields = line.split()
            self.senses[fields[0].replace("_", " ")] = ["n" + offset for offset in fields[-int(fields[2]) :]]

    def _lines(self, name: str) -> Iterator[str]:
        with (self.root / name).open(encoding="latin-1") as file:
            yield from (line for line in file if not line.startswith(" "))  # the licence is indented

    def _read_synset(self, line: str) -> None:
        head, _, gloss = line.partition("|")
        fields = head.split()
        synset, count = "n" + fields[0], int(fields[3], 16)
        self.names[synset] = [fields[4 + 2 * i].replace("_", " ") for i in range(count)]
        self.parents[synset] = []
        start = 4 + 2 * count
        for i in range(int(fields[start])):
            symbol, target, part_of_speech = fields[start + 1 + 4 * i : start + 4 + 4 * i]
            if part_of_speech == "n" and symbol in ("@", "@i"):
                self.parents[synset].append("n" + target)
                if symbol == "@i":
                    self.instances.add(synset)
        self.gloss[synset] = gloss.split('; "')[0].strip().rstrip(";")  # without the examples

    def ancestors(self, synset: str) -> frozenset[str]:
        """The synset itself and everything that it is a kind of."""
        if synset not in self._ancestors:
            found = frozenset([synset]).union(*(self.ancestors(parent) for parent in self.parents[synset]))
            self._ancestors[synset] = found
        return self._ancestors[synset]

    def find(self, name: str, under: Sequence[str]) -> str | None:
        """The commonest sense of `name` below one of the synsets `under`, which are tried in turn."""
        for root in under:
            for synset in self.senses.get(name.lower(), []):
                if root in self.ancestors(synset):
                    return synset
        return None

    def words(self, part_of_speech: str) -> list[str]:
        """Single lower-case words of three letters or more: part_of_speech is "adj" or "verb"."""
        words = (line.split()[0] for line in self._lines(f"index.{part_of_speech}"))
        return [word for word in words if re.fullmatch(r"[a-z]{3,}", word)]
