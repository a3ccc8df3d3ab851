"""Draw which parts of FedVL import which, and list its modules, from the code itself.

python tools/import_graph.py

It writes docs/images/import-graph.svg and the lists between markers in docs/architecture.md. Imports inside functions
count, imports under ``if TYPE_CHECKING`` do not.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedvl"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "import-graph.svg"

# The layers, upstream first: a module imports modules of its own layer and of earlier ones, never of a later one.
LAYERS: dict[str, tuple[str, ...]] = {
    "Base": (
        "version",
        "errors",
        "files",
        "seeding",
        "tensors",
        "config",
        "display",
    ),
    "Models": ("models",),
    "Data": ("data",),
    "Methods": ("methods",),
    "Federation": ("federation",),
    "Evaluation": ("evaluation",),
    "A run": ("runs",),
    "Comparisons": ("comparisons",),
    "Reports": ("report",),
    "Serving": ("serve",),
    "Audits": ("audit",),
    "Deployment": ("deployment",),
    "Commands and functions": ("commands", "api"),
    "Entry points": ("cli", "__main__", "__init__"),
}
LAYER_OF = {part: number for number, parts in enumerate(LAYERS.values()) for part in parts}


class Import(NamedTuple):
    """One module imports another."""

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{files()[self.module].relative_to(ROOT)}:{self.line}: {self.module} imports {self.target}"


# --- what the code says


@cache
def files() -> dict[str, Path]:
    """Return the file of each module, by its full name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        names = ("fedvl", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def part_of(module: str) -> str:
    """Return the package or module right below ``fedvl`` that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def layer_of(module: str) -> int:
    return LAYER_OF[part_of(module)]


@cache
def all_imports() -> list[Import]:
    """Return every import between modules of the package."""
    return [
        Import(module, target, line)
        for module, path in files().items()
        for target, line in imports_in(ast.parse(path.read_text(encoding="utf-8")), files())
    ]


def imports_in(node: ast.AST, known: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the known modules that are imported below a node, and the line of each import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno) for alias in child.names if alias.name in known)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                target = whole if whole in known else child.module or ""
                if target in known:
                    yield target, child.lineno
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from imports_in(ast.Module(child.orelse, []), known)
        else:
            yield from imports_in(child, known)


def imports_of_later_layers(imports: Iterable[Import]) -> list[Import]:
    return [found for found in imports if layer_of(found.target) > layer_of(found.module)]


def cycles(imports: Iterable[Import]) -> list[list[str]]:
    """Return each set of modules that import each other, directly or by way of others."""
    reached = {module: reach(module, edges(imports)) for module in files()}
    groups = {
        frozenset(other for other in reached[module] if module in reached[other]) | {module}
        for module in reached
        if module in reached[module]
    }
    return sorted(sorted(group) for group in groups)


def edges(imports: Iterable[Import]) -> dict[str, set[str]]:
    """Return what each module imports, with the packages that are loaded on the way to it."""
    found: dict[str, set[str]] = {module: set() for module in files()}
    for module, target, _ in imports:
        around = {name for name in packages(target) if name != module and name not in packages(module)}
        found[module] |= {target, *around} - {module}
    return found


def packages(module: str) -> list[str]:
    """Return the packages around a module, but for ``fedvl`` itself, which is loaded before everything else."""
    names = module.split(".")
    return [".".join(names[:end]) for end in range(2, len(names))]


def reach(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Return everything that can be reached from here; the start itself only by way of a cycle."""
    reached: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        if (name := ahead.pop()) not in reached:
            reached.add(name)
            ahead += graph[name]
    return reached


def parts_graph() -> dict[str, set[str]]:
    """Return which parts each part imports, but for the version, which many read and nothing depends on."""
    graph: dict[str, set[str]] = {part: set() for part in LAYER_OF}
    for found in all_imports():
        here, there = part_of(found.module), part_of(found.target)
        if here != there and there not in ("__init__", "version"):
            graph[here].add(there)
    return graph


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Leave out what follows from other imports."""
    return {
        part: {other for other in targets if not any(other in reach(way, graph) for way in targets - {other})}
        for part, targets in graph.items()
    }


# --- the picture

ROW, BOX, GAP, MARGIN, LETTER, TITLES = 62, 30, 26, 16, 7.4, 150
STYLE = """
.page { fill: #ffffff } .band { fill: #f1f4f8 } .box { fill: #ffffff; stroke: #48637f; stroke-width: 1.2 }
text { font: 13px system-ui, sans-serif; fill: #14202c } .title { font-size: 11px; fill: #56687a }
.arrow { fill: none; stroke: #5b7690; stroke-width: 1.3 } .head { fill: #5b7690 }
@media (prefers-color-scheme: dark) {
  .page { fill: #14181d } .band { fill: #1e252d } .box { fill: #14181d; stroke: #8fa9c4 }
  text { fill: #e8eef4 } .title { fill: #a3b3c2 } .arrow { stroke: #8fa9c4 } .head { fill: #8fa9c4 }
}
""".strip()
Node = tuple[str, int]  # a part and the row of its box, or "part>imported" and a row that the arrow passes


def bands(graph: Mapping[str, set[str]]) -> list[tuple[str, list[list[str]]]]:
    """Return titles and rows of parts from the entry points down; layers without imports between them share a band."""
    groups: list[tuple[str, list[str]]] = []
    for title, parts in LAYERS.items():
        before = groups[-1][1] if groups else []
        if before and len(parts) == 1 and not graph[parts[0]] & set(before):
            groups[-1] = (f"{groups[-1][0]}, {title}", [*before, *parts])
        else:
            groups.append((title, list(parts)))
    found = []
    for title, members in reversed(groups):
        depth: dict[str, int] = {}
        for part in sorted(members, key=lambda name: len(reach(name, graph))):
            depth[part] = 1 + max((depth.get(other, -1) for other in graph[part] & set(members)), default=-1)
        rows = [[part for part in members if depth[part] == level] for level in range(max(depth.values()), -1, -1)]
        found.append((title, rows))
    return found


def picture() -> str:
    """Return the import graph as SVG: boxes in layers, and arrows from what imports to what is imported."""
    graph = reduced(parts_graph())
    layout = bands(graph)
    rows: list[list[Node]] = [
        [(part, number) for part in row] for number, row in enumerate(r for _, b in layout for r in b)
    ]
    paths = route(graph, rows)
    place = arrange(rows, paths)
    width = max(place[node] + half(node) for row in rows for node in row) + MARGIN
    parts = [*draw_bands(layout, width), *(draw_arrow(path, place) for path in paths)]
    for node in (node for row in rows for node in row if ">" not in node[0]):
        x, y, name = place[node], middle(node[1]), "fedvl/__init__" if node[0] == "__init__" else node[0]
        box = f'x="{x - half(node):.0f}" y="{y - BOX / 2:.0f}" width="{2 * half(node):.0f}" height="{BOX}" rx="5"'
        parts.append(
            f'<rect class="box" {box}/><text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle">{escape(name)}</text>'
        )
    height = middle(len(rows) - 1) + ROW / 2 + MARGIN
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" role="img" aria-label="Import graph of FedVL">',
            f"<style>{STYLE}</style>",
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="head" d="M0 0 8 4 0 8z"/></marker>',
            f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
            *parts,
            "</svg>\n",
        )
    )


def half(node: Node) -> float:
    """Half the width of a box; an arrow that passes needs little."""
    name = "fedvl/__init__" if node[0] == "__init__" else node[0]
    return 4.0 if ">" in name else (len(name) * LETTER + 24) / 2


def middle(row: int) -> float:
    return MARGIN + ROW / 2 + row * ROW


def route(graph: Mapping[str, set[str]], rows: list[list[Node]]) -> list[list[Node]]:
    """Return the way of each arrow, a node in each row that it crosses, which is added to the row."""
    row_of = {part: number for row in rows for part, number in row}
    paths = []
    for part, targets in graph.items():
        for target in sorted(targets, key=list(row_of).index):
            between = [(f"{part}>{target}", row) for row in range(row_of[part] + 1, row_of[target])]
            for node in between:
                rows[node[1]].append(node)
            paths.append([(part, row_of[part]), *between, (target, row_of[target])])
    return paths


def arrange(rows: list[list[Node]], paths: Sequence[Sequence[Node]]) -> dict[Node, float]:
    """Order each row so that few arrows cross, and return the middle of each node."""
    near: dict[Node, list[Node]] = {node: [] for row in rows for node in row}
    for one, other in (pair for path in paths for pair in pairwise(path)):
        near[one].append(other)
        near[other].append(one)
    best = [list(row) for row in rows]
    for sweep in range(24):
        down = sweep % 2 == 0
        for number in range(len(rows)) if down else reversed(range(len(rows))):
            at = {node: index / max(len(row) - 1, 1) for row in rows for index, node in enumerate(row)}
            wanted = number - 1 if down else number + 1
            rows[number].sort(key=lambda node: fmean([at[n] for n in near[node] if n[1] == wanted] or [at[node]]))
        if crossings(rows, paths) < crossings(best, paths):
            best = [list(row) for row in rows]
    rows[:] = best
    around = {  # what a node is best amid: what it is joined to; of an arrow, its whole way, so that it is straight
        node: next(path for path in paths if node in path) if ">" in node[0] else near[node] for node in near
    }
    place = {node: 300.0 for row in rows for node in row}
    for sweep in range(600):
        for row in rows if sweep % 2 else reversed(rows):
            middle = [place[node] for node in row]  # of what has no arrow of its own
            spread(row, [fmean([place[other] for other in around[node]] or middle) for node in row], place)
    left = min(place[node] - half(node) for node in place) - TITLES
    return {node: x - left for node, x in place.items()}


def crossings(rows: Sequence[Sequence[Node]], paths: Sequence[Sequence[Node]]) -> int:
    at = {node: index for row in rows for index, node in enumerate(row)}
    lines = [(one[1], at[one], at[other]) for path in paths for one, other in pairwise(path)]
    return sum((a - c) * (b - d) < 0 for i, (row, a, b) in enumerate(lines) for same, c, d in lines[:i] if row == same)


def spread(row: Sequence[Node], wanted: Sequence[float], place: dict[Node, float]) -> None:
    """Put the nodes of a row where they are wanted, in their order and apart."""
    right, left = list(wanted), list(wanted)
    for i, (one, other) in enumerate(pairwise(row)):
        right[i + 1] = max(right[i + 1], right[i] + half(one) + half(other) + GAP)
    for i in range(len(row) - 2, -1, -1):
        left[i] = min(left[i], left[i + 1] - half(row[i]) - half(row[i + 1]) - GAP)
    place.update({node: (a + b) / 2 for node, a, b in zip(row, right, left, strict=True)})


def draw_bands(layout: Sequence[tuple[str, Sequence[Sequence[str]]]], width: float) -> Iterator[str]:
    row = 0
    for title, rows in layout:
        top, height = middle(row) - ROW / 2 + 3, ROW * len(rows) - 6
        yield f'<rect class="band" x="8" y="{top:.0f}" width="{width - 16:.0f}" height="{height:.0f}" rx="6"/>'
        for line, name in enumerate(title.split(", ")):
            yield f'<text class="title" x="16" y="{top + 15 + 13 * line:.0f}">{escape(name)}</text>'
        row += len(rows)


def draw_arrow(path: Sequence[Node], place: Mapping[Node, float]) -> str:
    x, y = place[path[0]], middle(path[0][1]) + BOX / 2
    drawn = f"M{x:.0f} {y:.0f}"
    for node in path[1:]:
        to, top = place[node], middle(node[1]) - BOX / 2
        drawn += f"C{x:.0f} {y + ROW / 4:.0f} {to:.0f} {top - ROW / 4:.0f} {to:.0f} {top:.0f}"
        if ">" in node[0]:  # straight past the boxes of this row
            drawn += f"V{top + BOX:.0f}"
        x, y = to, top + BOX
    return f'<path class="arrow" d="{drawn}" marker-end="url(#head)"><title>{path[0][0]} imports {path[-1][0]}</title></path>'


# --- the lists of the page


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring as one line of Markdown."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


def module_lists() -> str:
    """Return a table of modules for each layer."""
    lines = []
    for title, parts in LAYERS.items():
        lines += [f"### {title}", "", "| module | what it does |", "|---|---|"]
        for module, path in files().items():
            if part_of(module) in parts:
                lines.append(f"| `{path.relative_to(SOURCE)}` | {summary(path)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def import_table() -> str:
    """Return what each part imports directly, from the entry points down."""
    graph = parts_graph()
    rows = [
        f"| `{part}` | {', '.join(f'`{other}`' for other in LAYER_OF if other in graph[part]) or 'nothing of FedVL'} |"
        for part in reversed(LAYER_OF)
    ]
    return "\n".join(["| part | imports directly |", "|---|---|", *rows])


def filled(page: str) -> str:
    """Return the page with its generated lists renewed."""
    for name, text in (("modules", module_lists()), ("imports", import_table())):
        begin, end = f"<!-- {name}: written by tools/import_graph.py -->", f"<!-- end of {name} -->"
        before, between, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not (between and ended):
            raise SystemExit(f"{PAGE} needs the lines '{begin}' and '{end}'.")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


def main() -> None:
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for found in imports_of_later_layers(all_imports()):
        print(f"{found}, which is of a later layer")
    for group in cycles(all_imports()):
        print(f"A cycle of imports: {', '.join(group)}")


if __name__ == "__main__":
    main()
