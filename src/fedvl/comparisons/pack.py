"""A pack: a comparison with features in place of images, which others can execute again.

A folder or a zip file of JSON, TOML and safetensors, without pixels, weights and pickle:

pack.json              datasets without images, and the hash of each file
comparison.json        the summary, with the grid that was asked for
sources/N.safetensors  features of a dataset's images, and texts of its classes
runs/NAME/             config.toml, result.json and metrics.jsonl of each run
methods/PATH           files of methods that are not FedVL's

A zip file is not compressed, so that it cannot claim more than it has.
"""

import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pydantic import Field

from fedvl.comparisons.verification import COMPARISON, read_comparison
from fedvl.config import DataConfig, Experiment
from fedvl.data.packed import PackedOpener, PackedSource, differing, key_of, open_packed, pack_source
from fedvl.data.sources import Opener
from fedvl.errors import FedVLError
from fedvl.files import (
    SHORTENED,
    Content,
    Hash,
    file_sha256,
    no_link,
    read_file,
    read_json,
    regular,
    validated,
    write_whole,
)
from fedvl.methods import load_method
from fedvl.models import EMBEDDED
from fedvl.runs.folder import RunFolder
from fedvl.tensors import MAX_BYTES, Tensors, load, save
from fedvl.version import __version__

PACK = "pack.json"
PACK_FORMAT = 1
MAX_MEMBERS = 100_000
MAX_METHOD = 2**20  # bytes
OF_RUN = ("config.toml", "result.json", "metrics.jsonl")
RUN_FILE = r"runs/[A-Za-z0-9][A-Za-z0-9._-]*/(config\.toml|result\.json|metrics\.jsonl)"
METHOD_FILE = r"methods/([A-Za-z0-9_-]+/)*[A-Za-z0-9_-]+\.py"
MEMBER = re.compile(rf"pack\.json|comparison\.json|sources/[0-9]{{1,3}}\.safetensors|{RUN_FILE}|{METHOD_FILE}")
CARRIED = {"features", "embeddings", "present"}  # forms of images that follow from their features
OLDEST = (1980, 1, 1, 0, 0, 0)  # time of all members, so that the same pack has the same bytes


class PackContent(Content):
    """pack.json."""

    format: int
    fedvl_version: str
    sources: list[PackedSource] = Field(min_length=1, max_length=1000)
    files: dict[str, Hash]


def pack(folder: Path, out: Path, opener: Opener) -> str:
    """Bundle a comparison, whose images are here; return the SHA-256 of its pack.json."""
    summary = read_comparison(folder)
    if not summary.grid:
        raise FedVLError(
            f"The comparison in {folder} does not name its grid, so it cannot be executed again; run it again."
        )
    if out.exists():
        raise FedVLError(f"{out} exists already; choose another --out.")
    names = sorted(path.parent.name for path in (folder / "runs").glob("*/result.json"))
    runs = [RunFolder(folder / "runs" / name, trust_method=True) for name in names]
    experiments = [run.experiment for run in runs]
    for experiment in experiments:
        check_packable(experiment)
    if len({(experiment.model.name, experiment.model.encoding) for experiment in experiments}) > 1:
        raise FedVLError("A pack has features of one model, and this comparison has several; compare them one by one.")
    files: dict[str, bytes] = {COMPARISON: read_file(folder / COMPARISON, MAX_BYTES)}
    for run in runs:
        own = {name: run.file(name) for name in OF_RUN}
        files |= {
            f"runs/{run.path.name}/{name}": read_file(path, MAX_BYTES) for name, path in own.items() if path.is_file()
        }
        files |= dict(method_of_run(run))
    made = out.with_name(f".{out.name}.part") if out.suffix == ".zip" else out
    sources = []
    for number, (data, templates) in enumerate(dataset_groups(experiments)):
        source, tensors = pack_source(data, experiments[0].model.name, templates, opener)
        (made / "sources").mkdir(parents=True, exist_ok=True)
        save(made / f"sources/{number}.safetensors", tensors)
        sources.append(source)
    for name, content in files.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(made / name, content)
    hashes = {name: file_sha256(made / name) for name in members_of(made)}
    described = PackContent(format=PACK_FORMAT, fedvl_version=__version__, sources=sources, files=hashes)
    write_whole(made / PACK, json.dumps(described.to_dict(), indent=1, sort_keys=True).encode())
    sha256 = file_sha256(made / PACK)
    if made != out:
        zip_folder(made, out)
    return sha256


def check_packable(experiment: Experiment) -> None:
    """Refuse a run whose method needs more than features."""
    method = load_method(experiment.method.name)
    options = method.options_type.model_validate(experiment.method.options)
    label, model = experiment.method.label, experiment.model.name
    if more := [form for form in method.forms(options) if form not in CARRIED]:
        raise FedVLError(
            f"{label} needs {' and '.join(more)} of each image, which a pack does not have; leave {label} out of the comparison."
        )
    if method.through_encoder and model not in EMBEDDED:
        raise FedVLError(
            f"{label} trains through the text tower of '{model}', whose weights a pack does not have; leave {label} out of the "
            "comparison."
        )
    if experiment.data.additions or experiment.model.encoding != "float32" or experiment.privacy.public:
        raise FedVLError("A pack has no added images, no public images and no model.encoding; compare without them.")


def dataset_groups(experiments: list[Experiment]) -> Iterator[tuple[DataConfig, list[str]]]:
    """Yield the settings of each dataset, with the templates that runs on it use."""
    groups: dict[tuple[object, ...], list[Experiment]] = {}
    for experiment in experiments:
        groups.setdefault(key_of(experiment.data), []).append(experiment)
    for group in groups.values():
        yield group[0].data, sorted({experiment.data.templates for experiment in group})


def method_of_run(run: RunFolder) -> Iterator[tuple[str, bytes]]:
    """Yield the method's file of a run, under the path that its settings name."""
    name = str(run.settings.get("method", {}).get("name", ""))
    if not name.endswith(".py"):
        return
    member = f"methods/{PurePosixPath(name)}"
    if not MEMBER.fullmatch(member):
        raise FedVLError(
            f"The method {SHORTENED.repr(name)} is not below the current folder; name it as ./mine.py to pack it."
        )
    yield member, read_file(run.file(Path(name).name), MAX_METHOD)


def members_of(folder: Path) -> list[str]:
    """Return the files of a pack's folder by name; refuse one that a pack does not have."""
    found = []
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            no_link(Path(root) / name)
        found += [(Path(root) / name).relative_to(folder).as_posix() for name in files]
    if strange := [name for name in found if not MEMBER.fullmatch(name)]:
        raise FedVLError(f"A pack has no file {SHORTENED.repr(strange[0])}; get it anew from its author.")
    return sorted(name for name in found if name != PACK)


def zip_folder(folder: Path, out: Path) -> None:
    """Write the files of a pack, and remove its folder."""
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    with zipfile.ZipFile(aside, "w") as archive:
        for name in [PACK, *members_of(folder)]:
            with (
                archive.open(zipfile.ZipInfo(name, OLDEST), "w", force_zip64=True) as member,
                open(folder / name, "rb") as file,
            ):
                while part := file.read(2**20):
                    member.write(part)
            (folder / name).unlink()
    os.replace(aside, out)
    for root, _, _ in os.walk(folder, topdown=False):
        os.rmdir(root)


def pack_folder(path: Path, scratch: Path) -> Path:
    """Return the folder of a pack; a zip file is unpacked below ``scratch``."""
    if path.is_dir():
        return path
    out = scratch / "pack"
    try:
        with zipfile.ZipFile(regular(path, MAX_BYTES)) as archive:
            members = archive.infolist()
            check_members(path, members)
            for member in members:
                target = out / member.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, open(target, "xb") as file:
                    while part := source.read(2**20):
                        file.write(part)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise FedVLError(f"{path} is not a whole pack ({str(error)[:200]}); get it anew from its author.") from error
    return out


def check_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Refuse an archive that is not as a pack is written: names, links, compression and sizes."""
    names = [member.filename for member in members]
    strange = [name for name in names if not MEMBER.fullmatch(name)]
    if strange or len(set(names)) < len(names) or len(names) > MAX_MEMBERS:
        reason = f"it has a file {SHORTENED.repr(strange[0])}" if strange else "it has a file twice, or too many"
        raise FedVLError(f"{path} is not a pack: {reason}; get it anew from its author.")
    for member in members:
        kind = stat.S_IFMT(member.external_attr >> 16)
        stored = member.compress_type == zipfile.ZIP_STORED and member.file_size == member.compress_size
        if kind not in (0, stat.S_IFREG) or not stored:
            raise FedVLError(
                f"{path} is not a pack: {member.filename} is a link or is compressed; get it anew from its author."
            )
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise FedVLError(f"{path} is not a pack: its files claim more bytes than it has; get it anew from its author.")


def read_pack(folder: Path) -> tuple[PackContent, list[Tensors]]:
    """Read a pack, whose files have the hashes that it names."""
    path = folder / PACK
    found = read_json(path)
    if found is None:
        raise FedVLError(f"There is no {PACK} in {folder}; give a pack that fedvl pack wrote.")
    content = validated(PackContent, found, path)
    if content.format != PACK_FORMAT:
        raise FedVLError(f"{folder} is a pack of format {content.format}, and this version reads {PACK_FORMAT}.")
    names = members_of(folder)
    if names != sorted(content.files) or len(content.sources) != sum(name.startswith("sources/") for name in names):
        raise FedVLError(f"The files of {folder} are not those that its {PACK} names; get it anew from its author.")
    for name in names:
        if file_sha256(regular(folder / name, MAX_BYTES)) != content.files[name]:
            raise FedVLError(
                f"{name} of {folder} does not have the SHA-256 that {PACK} names; get it anew from its author."
            )
    return content, [load(folder / f"sources/{number}.safetensors") for number in range(len(content.sources))]


def open_pack(folder: Path, opener: Opener, trust_method: bool) -> tuple[PackedOpener, list[str]]:
    """Return an opener of a pack's features, and what is known of them, in sentences.

    Refuse features of an embedded dataset that are not those of the package, and code that is not
    trusted.
    """
    content, tensors = read_pack(folder)
    code = [name for name in content.files if name.startswith("methods/")]
    if code and not trust_method:
        raise FedVLError(f"{folder / code[0]} is code that a run would execute; read it, then say --trust-method.")
    packed = open_packed(list(zip(content.sources, tensors, strict=True)))
    told = []
    for source, own in zip(content.sources, tensors, strict=True):
        found = differing(source, own, opener)
        if found:
            raise FedVLError(f"The pack is forged: {found}.")
        known = "are those of this package" if found == "" else "cannot be checked without its images"
        told.append(f"The features and labels of {source.dataset} {known}.")
    return packed, told
