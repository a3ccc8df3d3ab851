"""The files around the code agree with it: workflows, templates, hooks, citation and changelog."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedvl import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = (".github/workflows/ci.yml", ".github/workflows/release.yml")
FORMS = (".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml")
HOOKS = ".pre-commit-config.yaml"
OTHERS = (".github/ISSUE_TEMPLATE/config.yml", "CITATION.cff", HOOKS)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def parsed(name: str) -> dict[Any, Any]:
    content = yaml.safe_load(text(name))
    assert isinstance(content, dict), name
    return content


def pinned(package: str) -> str:
    """The version in constraints.txt."""
    (version,) = re.findall(rf"^{package}==(\S+)$", text("constraints.txt"), re.MULTILINE | re.IGNORECASE)
    return str(version)


def step(job: dict[str, Any], word: str) -> str:
    """The one command of a job that has this word."""
    (found,) = [each["run"] for each in job["steps"] if word in each.get("run", "")]
    return str(found)


def sections() -> dict[str, str]:
    """Of the changelog: the text under each version, whether or not its heading has brackets and a date."""
    parts = re.split(r"^## \[?([^\]\s]+)\]?.*$", text("CHANGELOG.md"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_yaml_file_is_known_here():
    found = {str(path.relative_to(ROOT).as_posix()) for path in (ROOT / ".github").rglob("*.y*ml")}
    assert found == {name for name in (*WORKFLOWS, *FORMS, *OTHERS) if name.startswith(".github")}


@pytest.mark.parametrize("name", [*WORKFLOWS, *FORMS, *OTHERS])
def test_it_is_yaml(name):
    assert parsed(name)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_a_trigger_few_rights_and_jobs_that_do_something(name):
    workflow = parsed(name)
    assert workflow[True]  # YAML 1.1 reads the key "on" so
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
        else:
            assert job["runs-on"]
            assert all(("run" in each) != ("uses" in each) for each in job["steps"])


def test_the_tests_run_on_pushes_and_pull_requests_with_the_pinned_torch():
    workflow = parsed(WORKFLOWS[0])
    assert {"push", "pull_request"} <= set(workflow[True])
    job = workflow["jobs"]["test"]
    assert step(job, "tools/test") == "bash tools/test"
    asked = f"torch=={pinned('torch')}"
    assert asked in step(job, "torch").split()
    assert asked in text("tools/test").split()


def test_a_macos_job_checks_types_trains_and_tests_with_the_pinned_torch():
    job = parsed(WORKFLOWS[0])["jobs"]["macos"]
    assert job["runs-on"] == "macos-latest"
    assert f"torch=={pinned('torch')}" in step(job, "torch==").split()
    assert step(job, "mypy") == "mypy src"
    assert "fedvl run" in step(job, "fedvl doctor")
    tested = [name for name in step(job, "pytest").split() if name.startswith("tests/")]
    assert tested
    assert all((ROOT / name).exists() for name in tested)


def test_the_tested_pythons_are_the_oldest_and_newest_declared():
    project = tomllib.loads(text("pyproject.toml"))["project"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    tested = parsed(WORKFLOWS[0])["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert tested == [declared[0], declared[-1]]
    assert project["requires-python"] == f">={tested[0]}"


def test_a_release_is_tested_built_checked_and_published_without_a_password():
    jobs = parsed(WORKFLOWS[1])["jobs"]
    assert parsed(WORKFLOWS[1])[True] == {"push": {"tags": ["v*"]}}
    assert jobs["test"]["uses"].endswith(WORKFLOWS[0])
    assert step(jobs["build"], "tools/build") == "bash tools/build"
    assert text("tools/build").count("python -m build") == 2
    assert "cmp" in text("tools/build")
    assert "installed/bin" in step(jobs["build"], "test_readme.py")
    assert f"cyclonedx-bom=={pinned('cyclonedx-bom')}" == "cyclonedx-bom==7.5.0"
    attested = {
        each["uses"].partition("@")[0]: each["with"]
        for each in jobs["build"]["steps"]
        if "attest" in each.get("uses", "")
    }
    assert {each["subject-path"] for each in attested.values()} == {"dist/*"}
    assert attested["actions/attest-sbom"]["sbom-path"] in step(jobs["build"], "cyclonedx-py")
    assert "--strict" in step(jobs["build"], "twine check")
    publish = jobs["publish"]
    assert set(publish["needs"]) == {"test", "build"}
    assert publish["environment"] == "release"
    assert publish["permissions"] == {"id-token": "write"}
    assert any(each["uses"].startswith("pypa/gh-action-pypi-publish@") for each in publish["steps"])


@pytest.mark.parametrize(
    "tag, accepted", [(f"v{__version__}", True), (__version__, False), (f"v{__version__}.1", False), ("v", False)]
)
def test_a_tag_that_is_not_the_version_is_refused(tag, accepted):
    script = step(parsed(WORKFLOWS[1])["jobs"]["build"], "GITHUB_REF_NAME")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "GITHUB_REF_NAME": tag},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode == 0) == accepted, ran.stderr
    assert ("::error::" in ran.stdout) != accepted


@pytest.mark.parametrize("name", FORMS)
def test_an_issue_form_has_what_github_asks_for(name):
    form = parsed(name)
    assert form["name"]
    assert form["description"]
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in asked}) == len(asked) > 0
    assert all(field["attributes"]["label"] for field in asked)


def test_a_pull_request_says_what_why_and_how_it_was_shown():
    headings = re.findall(r"^## (.+)$", text(".github/PULL_REQUEST_TEMPLATE.md"), re.MULTILINE)
    assert headings == ["What", "Why", "How shown", "Checklist"]


def test_the_hooks_use_the_pinned_ruff():
    (ruff,) = [repo for repo in parsed(HOOKS)["repos"] if repo["repo"].endswith("/ruff-pre-commit")]
    assert ruff["rev"] == f"v{pinned('ruff')}"


def test_the_hooks_leave_the_embedded_files_alone():
    excluded = re.compile(parsed(HOOKS)["exclude"])
    embedded = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "embedded" in path.parts]
    assert embedded
    assert all(excluded.search(path.relative_to(ROOT).as_posix()) for path in embedded)
    assert not excluded.search("src/fedvl/data/embedded.py")


def test_the_citation_is_of_this_version_and_licence():
    citation = parsed("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == __version__
    assert citation["license"] == tomllib.loads(text("pyproject.toml"))["project"]["license"]


def test_the_changelog_has_what_is_coming_and_this_version():
    names = list(sections())
    assert names[0] == "Unreleased"
    assert __version__ in names[1:]
    assert sections()[__version__].strip()


def test_the_changelog_groups_changes_as_keep_a_changelog_does():
    known = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for version, content in sections().items():
        groups = re.findall(r"^### (.+)$", content, re.MULTILINE)
        assert set(groups) <= known, version
        assert len(set(groups)) == len(groups), version
