"""Check the installation: one line per finding, with what to do about it."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.text import Text

from fedvl.display import Console
from fedvl.errors import FedVLError
from fedvl.version import __version__, install_command

SOON_DAYS = 60  # before a certificate expires
PACKAGES_OF_EXTRAS = {
    "parquet": "pyarrow",
    "heic": "pillow-heif",
    "dicom": "pydicom",
    "privacy": "dp-accounting",
    "flower": "flwr",
    "serve": "fastapi",
}
Remark = tuple[str, str]  # "good", "note" or "bad", and a sentence


def examine(folder: Path | None = None, address: str | None = None) -> bool:
    """Print all findings; return whether everything that a run, or a federation, needs works.

    With an address, the connection to that server is one of them.
    """
    console = Console()
    marks = {"good": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("bad ", "red")}
    sound = True
    checks: list[Callable[[], list[Remark]]] = [python, torch_build, torchvision, embedded_models, embedded_images]
    checks += [cache_folder, npm, extras, *([partial(federation_folder, folder)] if folder else [])]
    checks += [partial(connection, address, folder)] if address else []
    for check in checks:
        for kind, sentence in guarded(check):
            console.print(Text.assemble(marks[kind], f" {sentence}"), soft_wrap=True)
            sound = sound and kind != "bad"
    return sound


def guarded(check: Callable[[], list[Remark]]) -> list[Remark]:
    try:
        return check()
    except (FedVLError, OSError) as error:
        return [("bad", str(error))]


def python() -> list[Remark]:
    return [("good", f"fedvl {__version__} on Python {sys.version.split()[0]}")]


def torch_build() -> list[Remark]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU, the CPU is used"
    return [("good", f"torch {torch.__version__}, {device}")]


def torchvision() -> list[Remark]:
    """Warn of a torchvision built for another torch, which breaks transformers and peft."""
    if importlib.util.find_spec("torchvision") is None:
        return []
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        return [
            ("note", "torchvision is installed but broken, which also breaks transformers: pip uninstall torchvision")
        ]
    return []


def embedded_models() -> list[Remark]:
    from fedvl.models import EMBEDDED
    from fedvl.models.checkpoint import load_model

    return [("good", f"embedded model {load_model(name).name} loads and has the right hash") for name in EMBEDDED]


def embedded_images() -> list[Remark]:
    from fedvl.data.catalogue import catalogue
    from fedvl.data.sources import open_dataset

    findings: list[Remark] = []
    for name in [name for name, entry in catalogue().items() if entry.embedded]:
        dataset = open_dataset(name)
        for split in dataset.splits.values():
            split.read(0)
        findings.append(("good", f"embedded images {name} open and have the right hash"))
    return findings


def cache_folder() -> list[Remark]:
    from fedvl.data.features import default_cache_dir

    folder = default_cache_dir()
    parent = next(path for path in [folder, *folder.parents] if path.exists())
    if not os.access(parent, os.W_OK):
        return [("bad", f"the feature cache {folder} is not writable: set FEDVL_CACHE to a writable folder")]
    free = shutil.disk_usage(parent).free
    kind, hint = ("note", "; free some, or set FEDVL_CACHE to another folder") if free < 2 * 10**9 else ("good", "")
    return [(kind, f"feature cache {folder}, {free / 1e9:.0f} GB free{hint}")]


def npm() -> list[Remark]:
    if shutil.which("npm"):
        return [("good", "npm found: fedvl data get works")]
    return [("note", "npm not found: fedvl data get needs it (install Node.js); everything else works")]


def extras() -> list[Remark]:
    findings: list[Remark] = []
    for extra, package in PACKAGES_OF_EXTRAS.items():
        try:
            findings.append(("good", f"extra {extra}: {package} {importlib.metadata.version(package)}"))
        except importlib.metadata.PackageNotFoundError:
            findings.append(("note", f"extra {extra} is not installed: {install_command(extra)} if you want it"))
    return findings


def federation_folder(folder: Path) -> list[Remark]:
    """Examine certificates and the clock by them, keys, experiments and the policy."""
    from fedvl.deployment.keys import check_certificate, days_left
    from fedvl.deployment.membership import check_key, read_federation
    from fedvl.deployment.state import state_folder

    names = {"ca.crt": "the authority's", "server.crt": "the server's"}
    findings: list[Remark] = []
    for name, whose in names.items():
        if name == "ca.crt" or (folder / name).exists():
            days = days_left(folder / name)
            if days >= 0:
                check_certificate(folder / name)
            kind, what = ("bad", "has expired") if days < 0 else ("note" if days < SOON_DAYS else "good", "is valid")
            hint = f"; fedvl federation renew {folder}" if days < SOON_DAYS and name == "server.crt" else ""
            findings.append((kind, f"{whose} certificate {what} for {abs(days)} days{hint}"))
    if (folder / "federation.json").exists():
        parties = read_federation(folder).parties
        waiting = [member.name for member in parties if not member.public_key]
        findings.append(("good", f"{len(parties) - len(waiting)} of {len(parties)} parties are admitted"))
        if waiting:
            findings.append(("note", f"not admitted: {', '.join(waiting)} (fedvl federation join, then admit)"))
        return [*findings, *experiments_in(folder)]
    check_key(folder)
    findings.append(("good", "this party's key is there and readable by its owner only"))
    return [*findings, *experiments_in(folder, state_folder(folder))]


def experiments_in(folder: Path, state: Path | None = None) -> list[Remark]:
    """Say whether each experiment has what it needs and, at a client, whether policy allows it."""
    from fedvl.config import read_toml
    from fedvl.deployment.extras import check_extras
    from fedvl.deployment.policy import POLICY_FILE, approved, identify, read_policy
    from fedvl.deployment.roster import needed_roster
    from fedvl.deployment.state import log_of
    from fedvl.runs.settings import resolve_experiment

    findings: list[Remark] = []
    policy = None
    if state is not None and not (state / POLICY_FILE).is_file():
        findings.append(("note", f"there is no {POLICY_FILE} yet: fedvl federation approve {folder} writes one"))
    elif state is not None:
        policy = read_policy(state)
        findings.append(("good", f"{POLICY_FILE} is valid"))
    for path in sorted(folder.glob("experiments/*.toml")):
        try:
            experiment = resolve_experiment(read_toml(path))
            check_extras(experiment)
            if policy is not None:
                policy.check_settings(experiment)
            if state is not None and (identify(experiment), needed_roster(folder, experiment)) not in approved(
                log_of(folder)
            ):
                findings.append(("note", f"experiment {path.stem} is not approved: fedvl federation approve {folder}"))
                continue
        except FedVLError as error:
            findings.append(("bad", f"experiment {path.stem}: {error}"))
            continue
        findings.append(("good", f"experiment {path.stem} has what it needs{' and is approved' if state else ''}"))
    return findings


def connection(address: str, folder: Path | None) -> list[Remark]:
    """Say how far a connection to a server gets, as a client's: name, port, TLS and so on."""
    from fedvl.deployment.connection import HOPS, UnreachableError, reach, read_authorities
    from fedvl.deployment.membership import KEY
    from fedvl.deployment.state import state_folder

    if not re.fullmatch(r".+:[0-9]{1,5}", address):
        raise FedVLError(f"{address} has no port; give --connect HOST:PORT, such as fed.example.org:9443.")
    authorities = read_authorities(folder / "ca.crt") if folder else ""
    key = state_folder(folder) / KEY if folder and (state_folder(folder) / KEY).exists() else None
    try:
        reached = reach(address, authorities, key)
    except UnreachableError as error:
        passed = [hop for hop in HOPS[: HOPS.index(error.hop)] if hop != "proxy" or error.proxy]
        fine: list[Remark] = [("good", f"connection to {address}: {', '.join(passed)}")] if passed else []
        return [*fine, ("bad", f"connection to {address} fails at: {error.hop}. {error}")]
    examined = HOPS[: HOPS.index("key")] if folder else HOPS[: HOPS.index("authority")]
    passed = [hop for hop in (HOPS if key else examined) if hop != "proxy" or reached.proxy]
    through = f" through the proxy {reached.proxy}" if reached.proxy else ""
    version = f"; the server runs FedVL {reached.version}" if reached.version else ""
    found: list[Remark] = [("good", f"connection to {address}{through}: {', '.join(passed)}{version}")]
    if key is None:
        missing = ", ".join(hop for hop in HOPS if hop not in passed and hop != "proxy")
        found.append(("note", f"not examined: {missing}; give the folder of a client that has joined"))
    return found
