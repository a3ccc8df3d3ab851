"""fedvl audit: attack a run's own messages and say what could be learned; check logs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedvl.commands.run import Json, Quiet, Trust
from fedvl.errors import FedVLError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedvl.audit.certificate import Certificate
    from fedvl.audit.finding import Audit
    from fedvl.config import Experiment
    from fedvl.tensors import ByClient, Tensors

EXAMPLES = """
Examples:

  fedvl audit runs/linear-cifar10-mini                 what its clients send

  fedvl audit experiment.toml --out audit.html         before anything is run

  fedvl audit runs/NAME --fail-above membership=0.6    exit code 1 if above

  fedvl audit runs/NAME --certificate                  may its results leave?

  fedvl audit clinic/parties/hospital-a --certificate --dataset images/
                                                       a client's part in a run between machines

  fedvl audit verify clinic/parties/hospital-a         check a party's log

  fedvl audit verify clinic clinic/parties/hospital-a  and against the server's
"""


def audit(
    words: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|EXPERIMENT | verify [FOLDER]...",
            help="Folder of a run, or a TOML file of settings; with verify: folders of parties and federations.",
        ),
    ],
    clients: Annotated[int, typer.Option(min=1, help="Clients whose messages are attacked.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="First rounds whose messages are attacked.")] = 2,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ATTACK=VALUE",
            help="Exit with code 1 if this value is above, 2 if it was not measured; repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The page; audit.html in the run's folder, or beside the TOML file.")
    ] = None,
    certificate: Annotated[
        bool,
        typer.Option(
            "--certificate",
            help="Also repeat the run, and write certificate.html, certificate.json and assessment.md into its folder; exit "
            "with code 1 if results should not leave. --fail-above states which leaks are accepted.",
        ),
    ] = False,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="With --certificate and a client's folder: its images, for its part in a run between machines."
        ),
    ] = None,
    trust_method: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Attack what clients send, and write a page of what could be learned; or verify logs."""
    target, *folders = words
    if str(target) == "verify":
        verify_logs(folders or [Path()])
        return
    if folders:
        raise FedVLError("Give one run or one TOML file; folders whose logs are checked come after verify.")
    from fedvl.audit.perform import audit as perform
    from fedvl.audit.perform import check_measured, exceeded, parse_limits
    from fedvl.audit.show import audit_table, write_audit
    from fedvl.display import TerminalDisplay

    limits = parse_limits(fail_above or [])
    if certificate and not target.is_dir():
        raise FedVLError(f"A certificate is for the results of a run; give the folder of a finished run, not {target}.")
    if dataset is not None:
        if not certificate:
            raise FedVLError("--dataset is for the certificate of a client's folder; add --certificate.")
        raise typer.Exit(0 if write_site_egress(target, dataset, limits, quiet) else 1)
    experiment, trained = open_target(target, trust_method)
    with TerminalDisplay(quiet) as display:
        found = perform(experiment, display, clients, rounds, trained)
    found = found.model_copy(update=hashes_of(target, trust_method))
    page = write_audit(found, out or (target / "audit.html" if target.is_dir() else target.with_suffix(".audit.html")))
    check_measured(found, limits)
    above = exceeded(found, limits)
    if as_json:
        print(found.model_copy(update={"above": above}).to_json())
    else:
        from fedvl.display import Console

        console = Console()
        for part in audit_table(found):
            console.print(part)
        console.print(f"Page: {page}", soft_wrap=True, highlight=False)
    for sentence in above:
        typer.echo(f"Above the limit: {sentence}", err=True)
    issued = not certificate or write_egress(target, found, limits, clients, rounds, trust_method, quiet)
    raise typer.Exit(1 if above or not issued else 0)


def hashes_of(target: Path, trust_method: bool) -> dict[str, str | None]:
    """Return the hashes by which an audit belongs to a run, or to a file of settings."""
    from fedvl.files import file_sha256
    from fedvl.runs.folder import RunFolder

    if not target.is_dir():
        return {"settings_sha256": file_sha256(target)}
    folder = RunFolder(target, trust_method)
    state = folder.result.state_sha256 if folder.finished else None
    return {"settings_sha256": folder.settings_sha256, "state_sha256": state}


def write_egress(
    target: Path,
    found: "Audit",
    limits: "Mapping[str, float]",
    clients: int,
    rounds: int,
    trust_method: bool,
    quiet: bool,
) -> bool:
    """Write the certificate of a run, and say why if it is not issued; return whether it is."""
    from fedvl.audit.certificate import certify, write_certificate
    from fedvl.display import TerminalDisplay
    from fedvl.runs.folder import RunFolder

    command = f"fedvl audit {target} --certificate --clients {clients} --rounds {rounds}{accepted_limits(limits)}"
    folder = RunFolder(target, trust_method)
    with TerminalDisplay(quiet) as display:
        certificate = certify(folder, found, limits, display, command)
    return said_certificate(certificate, write_certificate(certificate, folder.result, target))


def write_site_egress(place: Path, data: str, limits: "Mapping[str, float]", quiet: bool) -> bool:
    """Write the certificate of a client's part in its last run; return whether it is issued."""
    from fedvl.audit.certificate import write_certificate
    from fedvl.deployment.site_certificate import certify_site
    from fedvl.display import TerminalDisplay
    from fedvl.runs.folder import RunFolder

    command = f"fedvl audit {place} --certificate --dataset {data}{accepted_limits(limits)}"
    with TerminalDisplay(quiet) as display:
        certificate = certify_site(place, data, limits, display, command)
    folder = RunFolder.open(place)
    return said_certificate(certificate, write_certificate(certificate, folder.result, folder.path))


def accepted_limits(limits: "Mapping[str, float]") -> str:
    return "".join(f" --fail-above {name}={limit:g}" for name, limit in limits.items())


def said_certificate(certificate: "Certificate", page: Path) -> bool:
    """Say whether a certificate is issued, and why not; return it."""
    typer.echo(f"Certificate {'issued' if certificate.issued else 'not issued'}: {page}", err=True)
    for sentence in certificate.reasons:
        typer.echo(f"  {sentence}", err=True)
    return certificate.issued


def verify_logs(folders: list[Path]) -> None:
    """Check logs of clients and servers, and say what they hold and how they match."""
    from collections import Counter

    from fedvl.deployment.verification import entry_name, verify

    verified = verify(folders)
    for path, _, chain in verified.logs:
        kinds = Counter(str(entry.get("kind")) for entry in chain.entries)
        print(f"{path}: {len(chain.entries)} lines, and each fits the one before it.")
        print("  " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
        print(f"  the last has the hash {chain.head}")
        if chain.torn:
            print("  After it is part of a line, as a crash leaves it; the next entry will say so.")
    for traffic in verified.traffic:
        print(
            f"{traffic.sender.path} to {traffic.receiver.path}: {traffic.sent} sent, {traffic.received} received, "
            f"{traffic.matched} matched by SHA-256."
        )
        for what, entries in (
            ("in flight when a side was stopped", traffic.in_flight),
            ("lost and never answered", traffic.lost),
        ):
            if entries:
                print(f"  {len(entries)} {what}, the first on {entries[0]['time']} ({entry_name(entries[0])})")
    if len(folders) == 1:
        print("One log cannot tell whether its end was cut: give the other side's folder too.")
    elif not verified.traffic:
        print("No messages were matched: give the log of the server and of a client.")


def open_target(target: Path, trust_method: bool) -> "tuple[Experiment, tuple[Tensors, ByClient] | None]":
    """Return the experiment of a run or of a TOML file, and the run's model if it has one."""
    from fedvl.runs.folder import RunFolder
    from fedvl.runs.settings import resolve_experiment

    if target.is_dir():
        folder = RunFolder(target, trust_method)
        if folder.federation is not None:
            raise FedVLError(
                f"The clients of the run in {target} are on other machines, whose images are not here: each certifies its own "
                "part (fedvl audit FOLDER --certificate --dataset IMAGES). Or audit a TOML file of its settings with your images."
            )
        return folder.experiment, folder.tensors() if folder.finished else None
    if target.suffix != ".toml":
        raise FedVLError(f"{target} is neither the folder of a run nor a TOML file of settings; give one of them.")
    from fedvl.config import read_toml

    return resolve_experiment(read_toml(target)), None
