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
    device: Device = None,
    trust_method: Trust = False,
) -> None:
    """Query a run with images in a browser, or over HTTP.

    Open the printed address, enter class names and drop images: see the predictions, the weights of
    the clients and the remembered images. Nothing is written to disk. Stop it with Ctrl-C.
    """
    try:
        from fedvl.serve.app import make_app
        from fedvl.serve.connections import make_query_server, read_tls
    except ImportError as error:
        raise FedVLError(f"Serving needs FastAPI: {install_command('serve')}.") from error
    import secrets

    from PIL import Image

    from fedvl.report.loopback import is_loopback
    from fedvl.runs.folder import RunFolder
    from fedvl.serve.images import png_of
    from fedvl.serve.model import QueryBatch, TrainedModel

    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(16)
    tls = read_tls(certificate, key)
    with fitting(run):
        model = TrainedModel(RunFolder.open(run, trust_method), device)
        blank = QueryBatch(model.user(), 1, 1)
        blank.add({}, model.encode([model.read(png_of(Image.new("RGB", (8, 8))))])[0])
        blank.predict()
    server = make_query_server(make_app(model, token), tls)
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
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on standard output, a row per image.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, with all details.")] = False,
    device: Device = None,
    trust_method: Trust = False,
) -> None:
    """Predict the classes of images with the model of a run.

    For example: fedvl predict runs/NAME --classes "cat,dog" photos/
    """
    from fedvl.display import TerminalDisplay
    from fedvl.runs.folder import RunFolder
    from fedvl.serve.images import image_sources
    from fedvl.serve.model import TrainedModel, predict_images

    sources = list(image_sources(images))
    names = read_names(classes)
    with fitting(run), TerminalDisplay() as display:
        opened = TrainedModel(RunFolder.open(run, trust_method), device)
        lines = predict_images(opened, opened.user(names, client=client), sources, top, display.stage("Predicting"))
    if as_json:
        print(json.dumps(lines, ensure_ascii=False))
    elif as_csv:
        write_csv(lines)
    else:
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


def write_csv(lines: "list[Line]") -> None:
    from fedvl.display import csv_cell

    columns = [
        "image",
        "name",
        "score",
        "entropy",
        "prototype_of",
        "zero_shot_name",
        "zero_shot_score",
        "above_threshold",
        "refused",
    ]
    writer = csv.DictWriter(sys.stdout, columns, restval="")
    writer.writeheader()
    for line in lines:
        row = {name: value for name, value in line.items() if name in columns}
        for prefix, ranked in (("", line.get("ranked")), ("zero_shot_", line.get("zero_shot"))):
            if ranked:
                row |= {f"{prefix}name": ranked[0]["name"], f"{prefix}score": ranked[0]["score"]}
        if "above_threshold" in line:
            row["above_threshold"] = "; ".join(line["above_threshold"])
        writer.writerow({name: csv_cell(value) for name, value in row.items()})


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
        above = [", ".join(line["above_threshold"]) or "none"] if limited else []
        table.add_row(line["image"], Text(ranked[0], "bold"), *ranked[1:], line["zero_shot"][0]["name"], *above)
    Console().print(table)
