"""The three hospitals in containers: compose.yaml and the Dockerfile, as far as they can be tried without Docker."""

import re
import shlex
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import parse
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.deployment.files import LOOPBACK

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
HOSPITALS = ["hospital-a", "hospital-b", "hospital-c"]
ONCE = ["init", "join-a", "join-b", "join-c", "admit"]  # in the order that depends_on asks for


def lines(service: str) -> list[str]:
    """The commands of a container, as its shell or its entry point has them."""
    command = SERVICES[service]["command"]
    if isinstance(command, str):
        return [f"fedvl {command}"]
    party = SERVICES[service].get("environment", {}).get("PARTY", "")
    return [line.replace("$$PARTY", party) for line in command[0].splitlines()]


def volumes(service: str) -> dict[str, str]:
    """Where the volumes of a container are mounted, and which these are."""
    parts = [each.split(":") for each in SERVICES[service]["volumes"]]
    return {part[1]: part[0] for part in parts}


@pytest.mark.parametrize("service", SERVICES)
def test_every_command_is_one_of_fedvl(service):
    """Parsed as the command line does it: names, options and numbers of arguments."""
    found = [line for line in lines(service) if line.startswith("fedvl ")]
    assert found
    for line in found:
        parse(line)


def test_services_start_in_the_order_of_the_documentation():
    for service, earlier in {
        "init": [],
        **{f"join-{letter}": ["init"] for letter in "abc"},
        "admit": ["join-a", "join-b", "join-c"],
        **{name: ["admit"] for name in ["server", *HOSPITALS]},
    }.items():
        waits = SERVICES[service].get("depends_on", {})
        assert list(waits) == earlier
        assert all(each == {"condition": "service_completed_successfully"} for each in waits.values())
    assert {*ONCE, "server", *HOSPITALS} == set(SERVICES)


def test_nobody_sees_the_volume_of_another_and_hospitals_reach_the_server_alone():
    for service, own in {"server": "server", **{name: name for name in HOSPITALS}}.items():
        assert volumes(service) == {"/own": own}
    for name in HOSPITALS:
        assert volumes(f"join-{name[-1]}") == {"/own": name, "/post": f"post-{name[-1]}"}  # no other's request
        assert SERVICES[f"join-{name[-1]}"]["environment"] == {"PARTY": name}
    networks = [set(SERVICES[name]["networks"]) for name in HOSPITALS]
    assert all(not one & other for one in networks for other in networks if one is not other)
    assert set(SERVICES["server"]["networks"]) == set.union(*networks)
    posts = {f"/post/{letter}": f"post-{letter}" for letter in "abc"}
    assert volumes("init") == volumes("admit") == {"/own": "server", **posts}
    assert all(each.endswith(":ro") for each in SERVICES["admit"]["volumes"][1:])
    for settings in SERVICES.values():
        assert settings["cap_drop"] == ["ALL"]
        assert settings["read_only"]
        assert settings["tmpfs"] == ["/tmp"]
        assert settings["mem_limit"] == "4g"
        assert "ports" not in settings
        assert "privileged" not in settings


def test_the_hospitals_join_with_keys_that_stay_in_their_volumes(tmp_path):
    """The very commands of the one-time services, with a folder for each volume; ``cp`` and the like are run by a shell."""
    for service in ONCE:
        places = {mount: tmp_path / name for mount, name in volumes(service).items()}
        for place in places.values():
            place.mkdir(exist_ok=True)
        for line in lines(service):
            for mount, place in sorted(places.items(), reverse=True):  # the longest first
                line = line.replace(f"{mount}/", f"{place}/")
            if line.startswith("fedvl "):
                CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
            elif "python " in line:  # it writes the example images, and is tried in tests/tools
                assert (ROOT / re.findall(r"/opt/fedvl/(\S+)", line)[0]).is_file()
            else:
                subprocess.run(["sh", "-ec", line], check=True)
    members = yaml.safe_load((tmp_path / "server/clinic/federation.json").read_text())["parties"]
    assert [member["name"] for member in members if member["public_key"]] == HOSPITALS
    private = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if b"PRIVATE KEY" in content(path)}
    assert private == {
        "server/clinic/ca.key",
        "server/clinic/server.key",
        *(f"{name}/party/state/key" for name in HOSPITALS),
    }
    assert all(stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600 for name in private)
    assert all((tmp_path / name / "party" / "state" / "policy.toml").is_file() for name in HOSPITALS)
    host = re.findall(r"--host (\S+)", "\n".join(lines("init")))
    assert host == ["server"]  # by which containers find it
    assert host[0] not in LOOPBACK


def content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def test_the_image_has_the_program_alone_and_no_root():
    steps = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    installs = [line for line in steps if "pip install" in line]
    assert len(installs) == 2
    assert re.search(r"torch==([\d.]+) ", installs[0])[1] == pinned("torch")  # type: ignore[index]
    assert "-c constraints.txt" in installs[1]
    users = [line.split()[1] for line in steps if line.startswith("USER ")]
    assert users == ["fedvl"]
    copied = [word for line in steps if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in allowed if line.startswith("!")}
    assert kept == set(copied)
    assert allowed.index("*") < min(allowed.index(f"!{name}") for name in kept)
    extras = re.findall(r'"\.\[(.*)\]"', installs[1])[0].split(",")
    assert set(extras) <= extras_of_the_package()


def pinned(package: str) -> str:
    (version,) = re.findall(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(version)


def extras_of_the_package() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
