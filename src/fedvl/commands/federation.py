"""fedvl federation, server, client and status: a federation between real machines."""

import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvl.commands.flags import with_flags
from fedvl.commands.run import (
    Assignments,
    Json,
    MetricsPort,
    Out,
    Quiet,
    finish,
)
from fedvl.errors import FedVLError

if TYPE_CHECKING:
    from fedvl.deployment.roster import Roster

INIT_EXAMPLES = """
Examples:

  fedvl federation init clinic --clients hospital-a,hospital-b --method fst-cbdg

  fedvl federation init clinic --clients a,b --host fed.example.org mine.toml

Then hand clinic/parties/NAME to each party. It makes its key; you admit it.

  fedvl federation join hospital-a                       at each party

  fedvl federation admit clinic hospital-a.request.json  at the server, for each

  fedvl federation roster clinic                         for secure aggregation

  fedvl federation roster hospital-a roster.json         at each party

  fedvl federation approve hospital-a                    at each party

  fedvl server clinic                                    at the server

  fedvl client hospital-a --data IMAGES                  at each party
"""

federation_app = typer.Typer(no_args_is_help=True, help="A federation between real machines: make its folders.")

FederationFolder = Annotated[Path, typer.Argument(help="Folder that fedvl federation init made.")]
ClientFolder = Annotated[Path, typer.Argument(help="The folder that this client was handed.")]


@federation_app.command("init", epilog=INIT_EXAMPLES)
@with_flags("method", "dataset", "model", "rounds", "seed", "secure_sum", "privacy")
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    experiment: Annotated[Path | None, typer.Argument(help="TOML file of settings; flags win over it.")] = None,
    clients: Annotated[str, typer.Option(help="Names of the parties, comma-separated.")] = "",
    host: Annotated[str, typer.Option(help="Name or address under which clients reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the server.", min=1, max=65535)] = 9443,
    listen: Annotated[
        str, typer.Option(help="[127.0.0.1:]PORT to listen on, if a reverse proxy passes connections on from --port.")
    ] = "",
    settings: Assignments = None,
    **flags: Any,
) -> None:
    """Make certificates, the experiment, and a folder to hand to each party."""
    from fedvl.config import gather_settings
    from fedvl.deployment.extras import check_extras
    from fedvl.deployment.files import LOOPBACK, resolve_for_parties
    from fedvl.deployment.keys import authority_fingerprint
    from fedvl.deployment.membership import create
    from fedvl.runs.requirements import rule_note, statistics_note

    names = [name.strip() for name in clients.split(",") if name.strip()]
    if not names or len(set(names)) < len(names) or not all(re.fullmatch(r"\w[\w.-]{0,63}", name) for name in names):
        raise FedVLError(
            "--clients takes different names of letters, digits, - and _, for example hospital-a,hospital-b."
        )
    if listen and not re.fullmatch(r"(127\.0\.0\.1:)?[0-9]{1,5}", listen):
        raise FedVLError(
            f"--listen {listen} is not a port; give PORT, or 127.0.0.1:PORT behind a proxy on this machine."
        )
    if folder.exists():
        raise FedVLError(f"{folder} exists already; choose another folder.")
    given = gather_settings(experiment, flags, settings or [])
    resolved = resolve_for_parties(given, len(names))
    check_extras(resolved, resolved.data.dataset)
    create(folder, names, host, port, resolved, listen)
    print(f"{folder} is the server's; the fingerprint of its authority is\n  {authority_fingerprint(folder)}")
    print("Hand each party its folder:")
    for name in names:
        print(f"  {folder / 'parties' / name}")
    print(rule_note(resolved))
    if warning := statistics_note(resolved):
        print(warning)
    if host in LOOPBACK:
        print("All parties are on this machine, so their keys are made and the run is approved already.")
        print(
            f"Then: fedvl server {folder}, and for each party: fedvl client {folder / 'parties' / names[0]} --data IMAGES"
        )
    else:
        print(f"Each party runs: fedvl federation join {names[0]}, and sends you the request that it makes.")
        print(f"Then: fedvl federation admit {folder} {names[0]}.request.json, for each of them.")
        if resolved.federation.secure_sum:
            print(f"When all are admitted, send each the roster: fedvl federation roster {folder}")


@federation_app.command("join")
def join_federation(
    folder: ClientFolder,
    again: Annotated[bool, typer.Option("--renew", help="Replace the key that this client has.")] = False,
    moved: Annotated[
        bool, typer.Option("--moved", help="Go on with a folder that you moved or restored yourself; asks.")
    ] = False,
) -> None:
    """Make this client's key on its own machine, and a request to be admitted with it."""
    from fedvl.deployment.keys import fingerprint
    from fedvl.deployment.membership import make_join_request
    from fedvl.deployment.state import request_path, state_folder

    if moved:
        confirm_move(folder)
        return
    request = make_join_request(folder, again)
    state = state_folder(folder)
    print(f"The key is in {state / 'key'}. It stays there; never send {state} to anyone.")
    print(f"Send {request_path(folder, request.name)} to the server's operator. Then compare by telephone:")
    print(f"  this client's key       {fingerprint(request.public_key)}")
    print(f"  the server's authority  {request.authority}")
    print(f"{state / 'policy.toml'} says what this client answers: read it, and change it as you need.")
    print(f"Then approve the run: fedvl federation approve {folder}")
    if again:
        print("The other clients need a new roster with this key, and approve secure aggregation anew.")


def confirm_move(folder: Path) -> None:
    """Show what a state folder holds, and adopt it for this machine after confirmation."""
    from fedvl.deployment.audit_log import read_log
    from fedvl.deployment.keys import fingerprint, public_key_of
    from fedvl.deployment.state import adopt_state, state_folder

    state = state_folder(folder)
    print(f"{state} has the key {fingerprint(public_key_of(state / 'key'))}")
    print(f"and a log of {len(read_log(folder).chain.entries)} lines.")
    if not typer.confirm("Did this client make them, and did you move or restore the folder yourself?"):
        raise FedVLError(f"{folder} is not used; ask the operator for a new folder, and join with it.")
    adopt_state(folder)
    print(f"{state} is used on this machine from now on.")


@federation_app.command("roster")
def show_roster(
    folder: Annotated[Path, typer.Argument(help="Folder of the federation at its server, or of a client.")],
    received: Annotated[
        Path | None, typer.Argument(metavar="[ROSTER.json]", help="At a client: the file that the operator sent.")
    ] = None,
) -> None:
    """Write the keys of all admitted clients into a file; at a client, import and show it."""
    from fedvl.deployment.membership import read_federation
    from fedvl.deployment.roster import FILE, import_roster, pending_roster, pinned_roster, roster_of, write_roster
    from fedvl.deployment.state import open_state

    if (folder / "federation.json").exists():
        if received is not None:
            raise FedVLError("A server writes the roster, and imports none; leave the file out.")
        federation = read_federation(folder)
        roster = roster_of(folder, federation)
        write_roster(folder / FILE, roster)
        print_roster(roster)
        if missing := [member.name for member in federation.parties if not member.public_key]:
            print(f"Not admitted, and not in it: {', '.join(missing)}.")
        print(f"Send {folder / FILE} to each client, which runs: fedvl federation roster FOLDER {FILE}")
        return
    open_state(folder)
    if received is not None:
        print_roster(import_roster(folder, received))
        print("Compare the fingerprint with the other clients by telephone, not with the operator alone.")
        print(f"If all have the same: fedvl federation approve {folder}")
        return
    pending = pending_roster(folder)
    print_roster(pending or pinned_roster(folder))
    print(f"Not pinned yet: fedvl federation approve {folder}" if pending else "It is pinned.")


def print_roster(roster: "Roster") -> None:
    from fedvl.deployment.keys import fingerprint

    width = max((len(member.name) for member in roster.members), default=0)
    for member in roster.members:
        print(f"  {member.name:{width}}  {fingerprint(member.public_key)}")
    print(f"  authority {roster.authority}")
    print(f"Fingerprint of the roster of {len(roster.members)} clients:\n  {roster.fingerprint}")


@federation_app.command("approve")
def approve_runs(
    folder: ClientFolder,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask; the roster was compared, and all experiments are approved.")
    ] = False,
) -> None:
    """Show this client's roster and experiments, and approve them: it answers for no other."""
    from fedvl.deployment.extras import check_extras
    from fedvl.deployment.keys import check_certificate
    from fedvl.deployment.membership import approve_experiment
    from fedvl.deployment.policy import approved, identify, read_experiments, read_policy, write_policy
    from fedvl.deployment.roster import needed_roster
    from fedvl.deployment.state import log_of, open_state

    state = open_state(folder)
    check_certificate(folder / "ca.crt")
    experiments, log = read_experiments(folder), log_of(folder)
    if write_policy(state):
        print(f"{state / 'policy.toml'} is new: read it, and change it as you need.")
    confirm_roster(folder, yes)
    problem = None
    for name, experiment in experiments.items():
        check_extras(experiment)
        identity, federation = identify(experiment), experiment.federation
        print(f"{name}: {identity}")
        print(
            f"  {experiment.method.name} with {experiment.model.name}, {federation.rounds} rounds; "
            f"secure sum: {'yes' if federation.secure_sum else 'no'}; privacy: {experiment.privacy.unit}"
        )
        try:
            read_policy(state).check_settings(experiment)
        except FedVLError as error:
            print(f"  this client would refuse it: {error}")
        try:
            roster = needed_roster(folder, experiment)
        except FedVLError as error:  # the others can be approved
            problem = error
            print("  not approved: no roster is pinned")
            continue
        if (identity, roster) in approved(log):
            print("  approved")
        elif yes or typer.confirm("  Approve it?"):
            approve_experiment(folder, experiment)
            print("  approved now")
        else:
            print("  not approved")
    if problem is not None:
        raise problem


def confirm_roster(folder: Path, yes: bool) -> None:
    """Show a roster that was imported, and pin it once it was compared."""
    from fedvl.deployment.roster import pending_roster, pin_roster

    pending = pending_roster(folder)
    if pending is None:
        return
    print("A roster was imported:")
    print_roster(pending)
    if yes or typer.confirm("Did you compare its fingerprint with the other clients, and is it the same?"):
        pin_roster(folder, pending)
        print("It is pinned: secure aggregation is with these clients alone, and is approved anew.")
    else:
        print("It is not pinned.")


@federation_app.command("admit")
def admit_party(
    folder: FederationFolder,
    requests: Annotated[list[Path], typer.Argument(help="Requests that parties sent.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; the fingerprints were compared.")] = False,
) -> None:
    """Admit parties by the requests that they sent, after comparing fingerprints."""
    from fedvl.deployment.keys import fingerprint
    from fedvl.deployment.membership import admit_participant, find_member, read_federation, read_request

    for path in requests:
        request = read_request(path)
        before = find_member(read_federation(folder), request.name).public_key
        print(f"{request.name} asks to be admitted with the key\n  {fingerprint(request.public_key)}")
        if before:
            print(f"in place of\n  {fingerprint(before)}")
        if not yes and not typer.confirm("Did the party read you the same fingerprint?"):
            raise FedVLError(f"{request.name} is not admitted.")
        admit_participant(folder, request)
        print(f"{request.name} is admitted, from the next start of fedvl server on.")
    if all(member.public_key for member in read_federation(folder).parties):
        print(f"All clients are admitted. Hand them the roster: fedvl federation roster {folder}")


@federation_app.command("revoke")
def revoke_party(
    words: Annotated[list[str], typer.Argument(metavar="[FOLDER] NAME", help="Federation (default: here) and party.")],
) -> None:
    """Take a party's key out of the federation; a server at work refuses it from now on."""
    from fedvl.deployment.membership import absence_note, revoke

    if len(words) > 2:
        raise FedVLError("Give one party's name, after the federation's folder: fedvl federation revoke FOLDER NAME.")
    name, folder = words[-1], Path(words[0] if len(words) == 2 else ".")
    revoke(folder, name)
    print(f"{name} is revoked. It can join again: fedvl federation join --renew there, fedvl federation admit here.")
    print(f"The roster has changed. {absence_note(folder)}")


@federation_app.command("renew")
def renew_certificate(folder: FederationFolder) -> None:
    """Make the server's certificate anew, before it expires; parties need nothing."""
    from fedvl.deployment.keys import days_left
    from fedvl.deployment.membership import renew

    renew(folder)
    print(f"The server's certificate is valid for {days_left(folder / 'server.crt')} days, from its next start on.")


def server(
    folder: FederationFolder,
    experiment: Annotated[str | None, typer.Option(help="Which of its experiments, if there are several.")] = None,
    out: Out = None,
    metrics: MetricsPort = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment with clients on other machines; after a crash, use fedvl resume."""
    from fedvl.config import read_toml
    from fedvl.deployment.files import choose_experiment
    from fedvl.deployment.membership import absence_note
    from fedvl.deployment.server import federation_summary
    from fedvl.runs.folder import RunFolder
    from fedvl.runs.requirements import statistics_note
    from fedvl.runs.settings import resolve_experiment

    end_on_termination()
    resolved = resolve_experiment(read_toml(choose_experiment(folder, experiment)))
    if resolved.federation.secure_sum and (note := absence_note(folder)):
        print(note, file=sys.stderr)
    if warning := statistics_note(resolved):
        print(warning, file=sys.stderr)
    with RunFolder.create(out, resolved, federation_summary(folder)) as run_folder:
        print(f"Waiting for clients; follow the run with fedvl status {run_folder.path} --page", file=sys.stderr)
        finish(run_folder, as_json, quiet, metrics)


def client(
    folder: ClientFolder,
    data: Annotated[
        str | None,
        typer.Option(
            help="This party's images: folder, parquet file, manifest or dataset name. Absent: a rehearsal with the "
            "experiment's dataset."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be sent and what it gives away, and exit; no network.")
    ] = False,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for further runs when one is over.")] = False,
    ca_bundle: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of further certificate authorities, for a firewall that inspects TLS: their owners can read what "
            "is sent."
        ),
    ] = None,
    survey: Annotated[
        bool, typer.Option("--survey", help="Check the images and answer fedvl survey, and nothing else.")
    ] = False,
    page: Annotated[
        bool,
        typer.Option("--page", help="Serve a page on this machine to join, look, approve and follow."),
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free one.")] = 0,
    metrics: MetricsPort = None,
    quiet: Quiet = False,
) -> None:
    """Take part in a federation with this machine's images; they never leave it."""
    from fedvl.audit.show import own_figures
    from fedvl.deployment.client import Client
    from fedvl.display import Console, TerminalDisplay
    from fedvl.report.status import print_dry_run

    end_on_termination()
    if page:
        from fedvl.deployment.site import serve_site

        with TerminalDisplay(quiet) as display:
            serve_site(folder, data, display, stay, port, ca_bundle)
        return
    display = TerminalDisplay(quiet)
    say = partial(display.console.print, soft_wrap=True, highlight=False, markup=False)
    found = Client(folder, data, say, survey)
    if dry_run:
        with display:
            found.prepare(display)
        for rehearsal in found.dry_run():
            print_dry_run(rehearsal)
            for part in own_figures(rehearsal["audit"]):
                Console().print(part, highlight=False)
        return
    if found.rehearsal:
        print("This is a rehearsal with the experiment's own dataset; --data names your images.", file=sys.stderr)
    with found.watch(ca_bundle) as watch:
        with display:
            found.prepare(display)
        if not quiet:
            print(f"{found.file.name}: images are ready for the server {found.file.server}.", file=sys.stderr)
        found.serve(watch, stay, metrics)


def status(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    page: Annotated[bool, typer.Option("--page", help="Serve a page on this machine that follows the run.")] = False,
    port: Annotated[int, typer.Option(help="Port of the page; 0: any free one.")] = 0,
) -> None:
    """Show the state of a run: rounds, clients, bytes, refusals, accuracy so far."""
    from fedvl.report.status import print_status, serve_page

    if page:
        serve_page(folder, port)
    else:
        print_status(folder)


def end_on_termination() -> None:
    """Treat SIGTERM as Ctrl-C, so that everything that was started ends."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
