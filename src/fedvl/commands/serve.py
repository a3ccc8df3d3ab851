"""fedvl serve, predict and export: query a finished run in a browser or terminal, or export it."""

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvl.commands.run import Trust, read_names
from fedvl.errors import FedVLError
from fedvl.version import install_command

if TYPE_CHECKING:
    from fedvl.serve.model import Line

Run = Annotated[Path, typer.Argument(help="Folder of a finished run, such as runs/NAME, or a party's folder.")]
Classes = Annotated[
    str | None,
    typer.Option(help="Class names, as a,b,c or @FILE with one per line; the run's if absent."),
]
ClientOption = Annotated[
    int | None, typer.Option(min=0, help="Query this client's personal model (FedPP and the like).")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda; the run's if absent.")]
Unsure = Annotated[
    float | None,
    typer.Option(help="Answer 'unsure' below this share of the likeliest class, such as 0.8; the run's if absent."),
]


def serve(
    run: Run,
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="FEDVL_TOKEN", help="Token of all users; generated if others can connect.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Speak TLS with this certificate (PEM, chain included).")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key, without a password (PEM).")] = None,
    unsure: Unsure = None,
    example: Annotated[Path | None, typer.Option(help="Image that the page offers as an example.")] = None,
    reports: Annotated[
        Path | None, typer.Option(help="Folder to which users can report wrong answers; absent: they cannot.")
    ] = None,
    device: Device = None,
    trust_method: Trust = False,
) -> None:
    """Query a run with images in a browser, or over HTTP.

    Open the printed address, enter class names and drop images: see the predictions, the weights of
    the clients and the remembered images. Only --reports writes to disk. Stop it with Ctrl-C.
    """
    try:
        from fedvl.serve.app import Offered, make_app
        from fedvl.serve.connections import make_query_server, read_tls
    except ImportError as error:
        raise FedVLError(f"Serving needs FastAPI: {install_command('serve')}.") from error
    import secrets

    from PIL import Image

    from fedvl.data.given import png_of
    from fedvl.report.loopback import is_loopback
    from fedvl.runs.folder import RunFolder
    from fedvl.serve.images import example_file
    from fedvl.serve.model import QueryBatch, TrainedModel
    from fedvl.serve.reported import ReportBox

    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(16)
    tls = read_tls(certificate, key)
    with fitting(run):
        model = TrainedModel(RunFolder.open(run, trust_method), device)
        blank = QueryBatch(model.user(unsure=unsure), 1, 1)
        blank.add({}, model.encode([model.read(png_of(Image.new("RGB", (8, 8))))])[0])
        blank.predict()
    offered = Offered(unsure, example_file(model.folder, example), ReportBox(reports) if reports else None)
    server = make_query_server(make_app(model, token, offered=offered), tls)
    listener = listen(host, port)
    # The token is behind a #, which browsers do not send.
    print(
        f"Open {address(host, listener.getsockname()[1], tls is not None)}{f'#token={token}' if token else ''} (Ctrl-C stops it)",
        flush=True,
    )
    server.run([listener])


def predict(
    run: Run,
    images: Annotated[list[Path], typer.Argument(help="Image files and folders, which are searched recursively.")],
    classes: Classes = None,
    client: ClientOption = None,
    top: Annotated[int, typer.Option(min=1, help="Classes reported for each image.")] = 3,
    unsure: Unsure = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on standard output, a row per image.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, with all details.")] = False,
    device: Device = None,
    trust_method: Trust = False,
) -> None:
    """Predict the classes of images with the model of a run.

    For example: fedvl predict runs/NAME --classes "cat,dog" photos/
    """
    from fedvl.data.given import image_sources
    from fedvl.display import TerminalDisplay
    from fedvl.runs.folder import RunFolder
    from fedvl.serve.model import TrainedModel, predict_images

    sources = list(image_sources(images))
    names = read_names(classes)
    lines: list[Line] = []
    try:
        with fitting(run), TerminalDisplay() as display:
            opened = TrainedModel(RunFolder.open(run, trust_method), device)
            user = opened.user(names, client=client, unsure=unsure)
            writer = csv_writer(min(top, len(user.names))) if as_csv else None
            for line in predict_images(opened, user, sources, top, display.stage("Predicting")):
                lines.append(line)
                if writer:
                    writer.writerow(csv_row(line))
                    sys.stdout.flush()
    except KeyboardInterrupt:
        written = f"the rows of {len(lines):,} are written" if as_csv else "nothing is written; --csv writes row by row"
        print(f"Stopped before the end of {len(sources):,} images; {written}.", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(lines, ensure_ascii=False))
    elif not as_csv:
        print_table(lines)
    if all("refused" in line for line in lines):
        raise FedVLError(f"None of the {len(lines)} images can be used; the first because {lines[0]['refused']}")


def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    classes: Classes = None,
    client: ClientOption = None,
    device: Device = None,
    trust_method: Trust = False,
) -> None:
    """Write the model as a folder that needs no FedVL: Hugging Face's CLIP and a classifier."""
    from fedvl.runs.folder import RunFolder
    from fedvl.serve.export import export as write
    from fedvl.serve.model import TrainedModel

    names = read_names(classes)
    with fitting(run):
        write(TrainedModel(RunFolder.open(run, trust_method), device), folder, names, client)
    print(f"{folder / 'README.md'} says how to use it, {folder / 'MODEL_CARD.md'} where it comes from.")


@contextmanager
def fitting(run: Path) -> Iterator[None]:
    """Report in one sentence that the files of a run are inconsistent."""
    try:
        yield
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise FedVLError(
            f"The model in {run} does not fit its settings ({type(error).__name__}: {reason}); get a whole copy of the run."
        ) from error


def listen(host: str, port: int) -> Any:
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # a browser that connects before the app is up waits
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise FedVLError(f"Cannot listen on {host}:{port} ({reason}); choose another --host or --port.") from error
    return listener


def address(host: str, port: int, encrypted: bool) -> str:
    return f"{'https' if encrypted else 'http'}://{f'[{host}]' if ':' in host else host}:{port}/"


def csv_writer(ranks: int) -> "csv.DictWriter[str]":
    """Write the head of the table; each row is written as soon as it is known."""
    named = [f"{key}_{rank}" for rank in range(2, ranks + 1) for key in ("name", "score")]
    further = ("entropy", "prototype_of", "zero_shot_name", "zero_shot_score", "above_threshold", "refused")
    writer = csv.DictWriter(sys.stdout, ["image", "answer", "name", "score", *named, *further], restval="")
    writer.writeheader()
    return writer


def csv_row(line: "Line") -> dict[str, Any]:
    """Return the cells of an image."""
    from fedvl.display import csv_cell
    from fedvl.serve.model import answer_of

    kept = ("image", "entropy", "prototype_of", "refused")
    row: dict[str, Any] = {name: value for name, value in line.items() if name in kept}
    row["answer"] = answer_of(line)
    for prefix, ranked in (("", line.get("ranked", [])), ("zero_shot_", line.get("zero_shot", [])[:1])):
        for rank, each in enumerate(ranked, 1):
            ending = "" if rank == 1 else f"_{rank}"
            row |= {f"{prefix}name{ending}": each["name"], f"{prefix}score{ending}": each["score"]}
    if "above_threshold" in line:
        row["above_threshold"] = "; ".join(line["above_threshold"])
    return {name: csv_cell(value) for name, value in row.items()}


def print_table(lines: "list[Line]") -> None:
    from rich.table import Table
    from rich.text import Text

    from fedvl.display import Console

    most = max((len(line.get("ranked", [])) for line in lines), default=0)
    table = Table(box=None, pad_edge=False)
    limited = any("above_threshold" in line for line in lines)
    for title in ("image", "prediction", *["then"] * (most - 1), "zero-shot", *["above threshold"] * limited):
        table.add_column(title, overflow="fold")
    for line in lines:
        if "refused" in line:
            table.add_row(line["image"], Text(f"refused: {line['refused']}", "red"))
            continue
        ranked = [f"{each['name']} {each['score']:.0%}" for each in line["ranked"]]
        if line.get("unsure"):
            ranked[0] = f"unsure ({ranked[0]})"
        above = [", ".join(line["above_threshold"]) or "none"] if limited else []
        table.add_row(line["image"], Text(ranked[0], "bold"), *ranked[1:], line["zero_shot"][0]["name"], *above)
    Console().print(table)
