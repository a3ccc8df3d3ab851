"""fedvl predict, export and serve as a user types them."""

import csv
import io
import json
import re
import socket
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import httpx
import pytest
from helpers.finished import png
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.commands.run import read_names
from fedvl.commands.serve import csv_row, csv_writer, print_table
from fedvl.errors import FedVLError
from fedvl.serve import model as fedvl_model
from fedvl.serve.model import Line, Ranked, TrainedModel


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for row in range(3):
        (folder / f"{row}.png").write_bytes(png(row * 60))
    (folder / "more" / "last.PNG").write_bytes(png(300))
    (folder / "broken.jpg").write_bytes(b"no")
    (folder / "notes.txt").write_text("left alone")
    return folder


def fedvl(*words):
    found = CliRunner().invoke(app, [str(word) for word in words])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def test_predict_in_three_forms_says_the_same(folder_of, photos):
    words = ("predict", folder_of("fed-mp"), "--classes", "cat, ship,horse", photos)
    told = json.loads(fedvl(*words, "--json").stdout)
    names = ["0.png", "1.png", "2.png", "broken.jpg", "last.PNG"]
    assert [line["image"].rsplit("/", 1)[1] for line in told] == names
    rows = list(csv.DictReader(io.StringIO(fedvl(*words, "--csv").stdout)))
    table = fedvl(*words).stdout
    for line, row in zip(told, rows, strict=True):
        if "refused" in line:
            assert row["refused"] == line["refused"]
            assert row["name"] == ""
            continue
        assert {each["name"] for each in line["ranked"]} == {"cat", "ship", "horse"}
        best = line["ranked"][0]
        assert (row["name"], float(row["score"])) == (best["name"], best["score"])
        assert row["answer"] == best["name"]
        for rank, each in enumerate(line["ranked"][1:], 2):
            assert (row[f"name_{rank}"], float(row[f"score_{rank}"])) == (each["name"], each["score"])
        assert "name_4" not in row
        assert row["zero_shot_name"] == line["zero_shot"][0]["name"]
    assert table.count("refused:") == 1


def test_an_answer_below_the_least_share_is_unsure(folder_of, photos):
    words = ("predict", folder_of("linear"), photos)
    shares = sorted(
        line["ranked"][0]["score"] for line in json.loads(fedvl(*words, "--json").stdout) if "ranked" in line
    )
    least = (shares[1] + shares[2]) / 2  # two of four are below it
    told = json.loads(fedvl(*words, "--unsure", least, "--json").stdout)
    assert [line["unsure"] for line in told if "ranked" in line].count(True) == 2
    rows = list(csv.DictReader(io.StringIO(fedvl(*words, "--unsure", least, "--csv").stdout)))
    for line, row in zip(told, rows, strict=True):
        expected = "" if "refused" in line else "unsure" if line["unsure"] else line["ranked"][0]["name"]
        assert row["answer"] == expected
        assert row["name"] == ("" if "refused" in line else line["ranked"][0]["name"])
    assert fedvl(*words, "--unsure", least).stdout.count("unsure") == 2
    with pytest.raises(FedVLError, match=r"--unsure is a share between 0 and 1, such as 0\.8, and not 80"):
        fedvl(*words, "--unsure", 80)


def test_ctrl_c_keeps_the_rows_that_are_written(folder_of, photos, monkeypatch):
    class Interrupted(TrainedModel):
        def encode_files(self, sources):
            if sources[0][0].endswith("2.png"):
                raise KeyboardInterrupt
            return super().encode_files(sources)

    monkeypatch.setattr(fedvl_model, "TrainedModel", Interrupted)
    monkeypatch.setattr(fedvl_model, "ENCODED_TOGETHER", 2)
    monkeypatch.setattr(fedvl_model, "IMAGES_AT_ONCE", 2)
    found = fedvl("predict", folder_of("linear"), photos, "--csv")
    assert found.exit_code == 130
    assert [row["image"][-5:] for row in csv.DictReader(io.StringIO(found.stdout))] == ["0.png", "1.png"]
    assert "Stopped before the end of 5 images; the rows of 2 are written." in found.stderr
    assert "nothing is written; --csv writes row by row" in fedvl("predict", folder_of("linear"), photos).stderr


def test_predict_asks_in_the_batches_of_the_run(folder_of, fed_mp, tmp_path):
    """Forty images are asked 18, 18 and 4 at a time, whatever the encoder takes at once; a broken one among them is left out."""
    for row in range(40):
        (tmp_path / f"{row:02}.png").write_bytes(png(row * 11))
    (tmp_path / "05a.png").write_bytes(b"broken")
    told = json.loads(fedvl("predict", folder_of("fed-mp"), tmp_path, "--json").stdout)
    user = fed_mp.user()
    rows = fed_mp.encode([fed_mp.read(tmp_path / f"{row:02}.png") for row in range(40)])
    replies = [reply for first in (0, 18, 36) for reply in user.ask(rows[first : first + 18], 3)]
    good = [line for line in told if "refused" not in line]
    assert [line["ranked"][0]["name"] for line in good] == [reply.ranked[0][0] for reply in replies]
    assert [line["prototype_of"] for line in good] == [reply.example_of for reply in replies]


def test_predict_refuses_in_one_sentence(folder_of, photos, tmp_path):
    run = folder_of("linear")
    for words, sentence in (
        ((run, tmp_path / "nowhere"), "There is no"),
        ((run, photos / "notes.txt"), "None of the 1 images can be used"),
        ((tmp_path, photos), "There is no run in"),
        ((run, photos, "--classes", " , "), "--classes takes names"),
        ((run, photos, "--classes", "@nowhere.txt"), "Cannot read class names"),
        ((run, photos, "--classes", "cat,unicorn"), "knows only the classes"),
    ):
        with pytest.raises(FedVLError, match=sentence):
            fedvl("predict", *words)


def test_names_from_a_file_may_hold_commas(tmp_path):
    (tmp_path / "names.txt").write_text("fox, red\n\n猫\n", encoding="utf-8")
    assert read_names(f"@{tmp_path / 'names.txt'}") == ["fox, red", "猫"]


def test_serve_prints_an_address_that_answers(folder_of, photos, tmp_path):
    """On all addresses it makes up a token, without which nothing is told."""
    for host, secret in (("127.0.0.2", False), ("0.0.0.0", True)):
        words = [sys.executable, "-m", "fedvl.cli", "serve", str(folder_of("linear")), "--host", host, "--port", "0"]
        words += ["--unsure", "0.7", "--example", str(photos / "0.png"), "--reports", str(tmp_path / "reports")]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout
            told = re.match(rf"Open http://{host}:(\d+)/(?:#token=([\w-]+))? \(Ctrl-C", process.stdout.readline())
            assert told
            port, token = told.groups()
            assert bool(token) == secret
            request = urllib.request.Request(f"http://{host}:{port}/run")
            if secret:
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    urllib.request.urlopen(request, timeout=30)
                request.add_header("Authorization", f"Bearer {token}")
            with urllib.request.urlopen(request, timeout=30) as response:
                about = json.load(response)
            assert (about["method"], about["unsure"], about["example"]) == ("linear", 0.7, "0.png")
            assert about["reports"]
            assert (tmp_path / "reports" / "reported.csv").is_file()
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A folder with server.crt and server.key for this machine, and ca.crt, which vouches for them."""
    keys = pytest.importorskip("fedvl.deployment.keys")
    folder = tmp_path_factory.mktemp("keys")
    keys.make_authority(folder)
    keys.make_server_certificate(folder, "127.0.0.1")
    return folder


def test_serve_speaks_tls_with_a_certificate(folder_of, keys):
    words = [
        "--port",
        "0",
        "--certificate",
        keys / "server.crt",
        "--key",
        keys / "server.key",
        "--token",
        "0123456789abcdef",
    ]
    command = [sys.executable, "-m", "fedvl.cli", "serve", folder_of("linear"), *words]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        told = re.match(r"Open (https://127.0.0.1:\d+/)#token=0123456789abcdef \(Ctrl-C", process.stdout.readline())
        assert told
        trusting = ssl.create_default_context(cafile=keys / "ca.crt")
        with httpx.Client(
            base_url=told[1], verify=trusting, headers={"authorization": "Bearer 0123456789abcdef"}
        ) as client:
            assert client.get("/run").json()["method"] == "linear"
            session = client.post("/sessions", json={}, headers={"origin": told[1].rstrip("/")}).json()
            answer = client.post(f"/sessions/{session['id']}/images", files=[("files", ("cat.png", png(0)))])
            assert answer.json()["ranked"]
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(told[1])
        with pytest.raises(httpx.HTTPError):
            httpx.get(told[1].replace("https", "http"))
    finally:
        process.terminate()
        process.wait(30)


def test_serve_says_which_files_tls_needs(folder_of, keys, tmp_path):
    (tmp_path / "none.pem").write_text("no certificate")
    for words, sentence in (
        (["--certificate", keys / "server.crt"], "TLS needs both files: --certificate FILE and --key FILE"),
        (
            ["--certificate", keys / "server.crt", "--key", keys / "ca.key"],
            "are not a PEM certificate and its key .*MISMATCH",
        ),
        (
            ["--certificate", tmp_path / "none.pem", "--key", keys / "server.key"],
            "are not a PEM certificate and its key",
        ),
        (["--certificate", tmp_path / "absent", "--key", keys / "server.key"], "No such file"),
    ):
        with pytest.raises(FedVLError, match=sentence):
            fedvl("serve", folder_of("linear"), "--port", "0", *words)


@pytest.mark.parametrize("token", ["", "abc"])
def test_serve_refuses_a_token_that_can_be_guessed(folder_of, token):
    with pytest.raises(FedVLError, match="characters, fewer than 16, and can be guessed; give --token"):
        fedvl("serve", folder_of("linear"), "--host", "0.0.0.0", "--port", "0", "--token", token)


def test_names_are_inert_in_a_terminal_and_in_a_spreadsheet(capsys):
    """Escape sequences and formulas in names of classes and files, which others may have chosen."""
    names = ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "\x1b[2Jcat", "\x9b2J", "dog\r\n", "猫 & <b>", "a=b"]
    ranked: list[Ranked] = [{"name": name, "score": 0.5} for name in names]
    lines: list[Line] = [
        {"image": "=evil\x1b.png", "ranked": ranked[i:], "entropy": 0.1, "zero_shot": ranked[i:]} for i in range(9)
    ]
    csv_writer(9).writerows(map(csv_row, lines))
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    shown = [
        "'=HYPERLINK(1)",
        "'+1",
        "'-1",
        "'@SUM(1)",
        "\\x1b[2Jcat",
        "\\x9b2J",
        "dog\\r\n",
        "猫 & <b>",
        "a=b",
    ]
    assert [row["name"] for row in rows] == [row["zero_shot_name"] for row in rows] == shown
    assert {row["image"] for row in rows} == {"'=evil\\x1b.png"}
    assert {row["score"] for row in rows} == {"0.5"}
    print_table([*lines, {"image": "\x1b]0;evil\x07", "refused": "\x1b[31mno"}])
    assert not {"\x1b", "\x9b", "\x07", "\r"} & set(capsys.readouterr().out)


def test_serve_says_that_a_port_is_taken(folder_of):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(FedVLError, match="choose another --host or --port"):
            fedvl("serve", folder_of("linear"), "--port", taken.getsockname()[1])


def test_export_writes_a_folder(folder_of, tmp_path):
    said = fedvl("export", folder_of("linear"), tmp_path / "out").stdout
    assert "README.md says how to use it" in said.replace("\n", "")
    assert (tmp_path / "out" / "classifier.safetensors").is_file()


def test_the_client_of_the_documentation_works(address, photos, tmp_path):
    document = (Path(__file__).parents[2] / "docs" / "serve.md").read_text("utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", document, re.DOTALL) if "httpx" in code)
    assert len([line for line in code.splitlines() if line]) <= 10
    (tmp_path / "client.py").write_text(code.replace("http://127.0.0.1:8000", address))
    words = [sys.executable, tmp_path / "client.py", photos / "0.png", photos / "broken.jpg"]
    good, bad = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert re.match(r"0.png \{'name': '(cat|ship)'", good)
    assert bad == "broken.jpg it is not an image of a known format (JPEG, PNG, GIF, WebP, BMP, TIFF, PPM)."
