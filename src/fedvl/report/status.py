"""Status of a run, read from the files in its folder: for the terminal and as a local page."""

import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from fedvl.config import resolve
from fedvl.display import Console, visible
from fedvl.federation.records import Record
from fedvl.report.charts.lines import Series, line_chart
from fedvl.report.loopback import page_server
from fedvl.report.page import render
from fedvl.report.reading import number
from fedvl.report.tables import MISSING, human_bytes, human_seconds, percent, sure
from fedvl.runs.contents import Status
from fedvl.runs.folder import RunFolder
from fedvl.tensors import Tensors, count_bytes

REFRESH_SECONDS = 3
REFUSALS_SHOWN = 20
ROUND_HEADS = ("round", "accuracy", "loss", "answered", "up", "down", "time")


class Refusal(NamedTuple):
    round: int
    party: str
    reason: str


class PartyStatus(NamedTuple):
    name: str
    state: str
    last_seen: str
    missed: int  # rounds


class RunStatus(NamedTuple):
    """The status of a run that is in progress, stopped or finished."""

    method: str
    phase: str
    rounds: int
    records: list[Record]
    refused: list[Refusal]
    zero_shot: float | None
    parties: list[PartyStatus]
    certificate_days: int | None
    accuracy: str  # the last one, with its interval; "" if unknown

    @property
    def bytes_up(self) -> int:
        return sum(record.bytes_up for record in self.records)

    @property
    def bytes_down(self) -> int:
        return sum(record.bytes_down for record in self.records)


def read_status(folder: Path) -> RunStatus:
    """Read the status of a run from the files in its folder."""
    run = RunFolder(folder)
    settings, records, live, finished = run.settings, run.rounds, run.status, run.finished
    experiment = resolve([settings])
    rounds = experiment.federation.rounds
    names = live.parties  # empty if all clients are in one process
    doing = live.phase or "starting"
    if (absent := set(live.waiting_for) - set(live.connected)) and names:
        doing = f"waiting for {', '.join(name_of(names, client) for client in sorted(absent))}"
    phase = f"round {live.round or len(records) + 1} of {rounds}: {doing}"
    if finished or not run.at_work:
        live = live.model_copy(update={"connected": [], "waiting_for": []})
        phase = (
            "finished" if finished else f"stopped after round {len(records)} of {rounds}; continue with fedvl resume"
        )
    return RunStatus(
        method=experiment.method.name,
        phase=phase,
        rounds=rounds,
        records=records,
        refused=[
            Refusal(record.round, name_of(names, item.client), item.reason)
            for record in records
            for item in record.refused
        ],
        zero_shot=number(run.result.zero_shot_accuracy) if finished else None,
        parties=[describe_party(client, name, live, records, ended(run, client)) for client, name in enumerate(names)],
        certificate_days=live.certificate_days,
        accuracy=accuracy_line(records, live.test_images or 0),
    )


def accuracy_line(records: list[Record], images: int) -> str:
    """Say how sure the last accuracy is; "" where that is not known."""
    last = next((record for record in reversed(records) if record.accuracy is not None), None)
    if last is None or not images:
        return ""
    return f"Round {last.round}: {sure(last.accuracy, images)} of {images:,} test images; in brackets, 95 %."


def ended(run: RunFolder, client: int) -> str:
    """Return how a finished run stands with a party: whether it was told and has the model."""
    if not run.finished:
        return ""
    told = run.federation.told if run.federation else []
    return "finished" if client in told else "has not fetched the model"


def describe_party(client: int, name: str, live: Status, records: list[Record], ended: str) -> PartyStatus:
    seen = live.last_seen.get(str(client))
    there, awaited = client in live.connected, client in live.waiting_for
    return PartyStatus(
        name=name,
        state=ended or ("not connected" if not there else "working" if awaited else "connected"),
        last_seen=f"{human_seconds(max(time.time() - seen, 0))} ago" if seen else "now" if there else "never",
        missed=sum(client in record.dropped for record in records),
    )


def name_of(names: list[str], client: int) -> str:
    return names[client] if client < len(names) else f"client {client}"


# --- the terminal


def print_status(folder: Path) -> None:
    found, console = read_status(folder), Console()
    console.print(f"{found.method}, {found.phase}", highlight=False)
    if found.parties:
        table = Table("party", "state", "last seen", "rounds missed", box=None, pad_edge=False)
        for party in found.parties:
            table.add_row(Text(party.name), party.state, party.last_seen, str(party.missed))
        console.print(table)
    if found.certificate_days is not None:
        console.print(certificate_line(found.certificate_days), highlight=False)
    table = Table(*ROUND_HEADS, box=None, pad_edge=False)
    for cells in round_cells(found):
        table.add_row(*cells)
    console.print(table)
    if found.accuracy:
        console.print(found.accuracy, highlight=False)
    for record in found.records:
        if record.void:
            console.print(f"Round {record.round} has no update. {record.void}", highlight=False)
    for item in found.refused[-REFUSALS_SHOWN:]:
        console.print(f"Refused in round {item.round}: {item.party}, {item.reason}", highlight=False)


def certificate_line(days: int) -> str:
    return f"The server's certificate is valid for {days} days" + ("; fedvl federation renew." if days < 60 else ".")


def round_cells(found: RunStatus) -> list[list[str]]:
    return [
        [
            str(record.round),
            percent(record.accuracy) if "accuracy" in record.model_fields_set else "",
            MISSING if record.loss is None else f"{record.loss:.4f}",
            f"{len(record.cohort) - len(record.dropped)} of {len(record.cohort)}",
            human_bytes(record.bytes_up),
            human_bytes(record.bytes_down),
            human_seconds(record.seconds),
        ]
        for record in found.records
    ]


def print_dry_run(rehearsal: dict[str, Any]) -> None:
    console = Console()
    console.print(f"{rehearsal['experiment']}: one round of {rehearsal['method']}; nothing was sent.", highlight=False)
    table = Table("leaves", "in", "shape", "type", "bytes", box=None, pad_edge=False)
    for kind, tensors in rehearsal["leaves"].items():
        for name, tensor in sorted(tensors.items()):
            table.add_row(
                name,
                kind,
                " x ".join(map(str, tensor.shape)),
                str(tensor.dtype)[6:],
                f"{count_bytes({name: tensor}):,}",
            )
    console.print(table)
    total = sum(count_bytes(tensors) for tensors in rehearsal["leaves"].values())
    console.print(
        f"{total:,} bytes in total, plus {numbers_sent(rehearsal)} and a salted SHA-256 of what stays.\n",
        highlight=False,
    )
    if rehearsal["least_clients"] is not None:
        console.print(
            f"All of it leaves masked: the server reads a sum over {rehearsal['least_clients']} clients or more. Below, this "
            "update alone is attacked as the worst case, and such a sum.\n",
            highlight=False,
        )
    table = Table("stays", "", "shape", "type", "bytes", box=None, pad_edge=False)
    table.add_row("images and labels", "", str(rehearsal["images"]), "", "")
    own: Tensors = rehearsal["stays"]
    for name, tensor in sorted(own.items()):
        table.add_row(
            name, "", " x ".join(map(str, tensor.shape)), str(tensor.dtype)[6:], f"{count_bytes({name: tensor}):,}"
        )
    console.print(table)
    state = rehearsal["refusal"] or "It is approved, and policy.toml allows it."
    console.print(f"\n{state}", highlight=False, soft_wrap=True)


def numbers_sent(rehearsal: dict[str, Any]) -> str:
    """Name the numbers beside the tensors; under differential privacy no loss leaves."""
    told = rehearsal["numbers"]
    counts = f"a weight ({told['weight']:g}), a number of examples ({told['examples']})"
    return f"{counts}, no loss," if rehearsal["private"] else f"{counts}, a loss ({told['loss']:.4g})"


# --- the page


def render_status(found: RunStatus) -> str:
    """Return the page; it is read anew every few seconds."""
    curve = [(record.round, value) for record in found.records if (value := number(record.accuracy)) is not None]
    values = {
        **found._asdict(),
        "refresh": REFRESH_SECONDS,
        "charts": [
            Markup(line_chart([Series("", curve)], found.zero_shot, width, height, "accuracy, %", unit=" %"))
            for width, height in ((848, 260), (356, 230))
            if curve
        ],
        "rows": round_cells(found)[::-1],
        "heads": ROUND_HEADS,
        "refused": found.refused[: -REFUSALS_SHOWN - 1 : -1],
        "traffic": f"{human_bytes(found.bytes_up)} up, {human_bytes(found.bytes_down)} down",
        "certificate": "" if found.certificate_days is None else certificate_line(found.certificate_days),
    }
    return visible(render("status.html.j2", values))


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    read_status(folder)
    policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return page_server(
        port, "/", lambda: render_status(read_status(folder)), "text/html; charset=utf-8", "--port", policy
    )


def serve_page(folder: Path, port: int) -> None:
    server = make_server(folder, port)
    print(f"http://127.0.0.1:{server.server_port}/ follows {folder}; Ctrl-C ends it.", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
