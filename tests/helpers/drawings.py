"""Elements of a drawing in SVG, as tests of charts look for them."""

from typing import Any
from xml.etree import ElementTree


def drawn(svg: str) -> Any:
    return ElementTree.fromstring(svg)


def with_class(root: Any, name: str) -> list[Any]:
    return [node for node in root.iter() if name in (node.get("class") or "").split()]


def titles(root: Any) -> list[str]:
    return [node.text for node in root.iter("title")]
