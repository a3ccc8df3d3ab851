"""The examples in deploy/: systemd units, Kubernetes manifests, nginx and Caddy, as far as they can be tried without them."""

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import parse
from helpers.network import configured

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted(path.name for path in (DEPLOY / "systemd").glob("*.service"))
MANIFESTS = {
    f"{path.stem}-{manifest['kind']}": manifest
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))
}
KUBERNETES = ("1.30", "1.37")
COMMAND = re.compile(r"fedvl (?:client|server|resume|federation) [^;'\n]*")


def workload(name: str) -> Any:
    kinds = {"server": "Job", "client": "Deployment"}
    return MANIFESTS[f"{name}-{kinds[name]}"]["spec"]["template"]


def test_every_command_in_the_examples_is_one_of_fedvl() -> None:
    found = [line for path in DEPLOY.rglob("*") if path.is_file() for line in COMMAND.findall(path.read_text())]
    found = [line for line in found if " join and approve" not in line]
    found.append("fedvl " + " ".join(workload("client")["spec"]["containers"][0]["args"]))
    assert {line.split()[1] for line in found} == {"client", "server", "resume", "federation"}
    for line in found:
        parse(line.replace("hospital-a,hospital-b", "a,b"))


@pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed")
@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_fit_the_schemas_of_kubernetes(name: str, version: str) -> None:
    """Strict: a field that does not exist is an error."""
    import kubernetes_validate

    kubernetes_validate.validate(MANIFESTS[name], version, strict=True)
    broken = {**MANIFESTS[name], "specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


@pytest.mark.parametrize("name", ["server", "client"])
def test_a_pod_has_no_rights_and_no_network_that_it_does_not_need(name: str) -> None:
    pod = workload(name)
    (container,) = pod["spec"]["containers"]
    assert pod["metadata"]["labels"] == {"app": f"fedvl-{name}"}
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["securityContext"]["runAsUser"] == 1000  # as in the Dockerfile
    assert "fsGroup" not in pod["spec"]["securityContext"]  # keys that a group can read are refused
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    policy = MANIFESTS[f"{name}-NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert policy["egress" if name == "server" else "ingress"] == []


def test_the_servers_port_is_the_one_that_is_offered() -> None:
    (port,) = MANIFESTS["server-Service"]["spec"]["ports"]
    (container,) = workload("server")["spec"]["containers"]
    (rule,) = MANIFESTS["server-NetworkPolicy"]["spec"]["ingress"]
    assert port["targetPort"] == container["ports"][0]["containerPort"] == rule["ports"][0]["port"] == 9443


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_finds_no_mistake_in_a_unit(unit: str, tmp_path: Path) -> None:
    program = tmp_path / "fedvl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (DEPLOY / "systemd" / unit).read_text().replace("/opt/fedvl/bin/fedvl", str(program))
    (tmp_path / unit).write_text(text)
    words = ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Restart=on-failure" in text


@pytest.mark.parametrize(
    "name, words", [("nginx.conf", ["nginx", "-t", "-q", "-c"]), ("Caddyfile", ["caddy", "validate", "--config"])]
)
def test_a_reverse_proxy_accepts_its_example(name: str, words: list[str], tmp_path: Path) -> None:
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    from fedvl.deployment.keys import make_authority, make_server_certificate

    make_authority(tmp_path)
    make_server_certificate(tmp_path, "localhost")
    path = tmp_path / name
    path.write_text(configured(name, tmp_path, 20443, 20444))
    adapter = ["--adapter", "caddyfile"] if name == "Caddyfile" else ["-e", "stderr", "-g", f"pid {tmp_path}/pid;"]
    done = subprocess.run([*words, str(path), *adapter], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
