"""Mistakes that people make at the command line: each is answered by one sentence that says what to do."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.finished import RUNS, finish
from PIL import Image
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.errors import FedVLError

# The command, and the words of its answer that help.
MISTAKES = {
    # names that are nearly right
    "run --method fedporx": "did you mean 'fedprox'?",
    "run --method ./absent.py": "There is no method file absent.py; check the path",
    "run --dataset cifar10-min": "did you mean cifar10-mini",
    "run --model clip": "give fedvl-tiny, fedvl-tiny-vilt, a folder, a .safetensors file, a hub name (owner/model)",
    "run --preset published": "it has paper",
    "run --protocol close": "it must be 'closed', 'open', 'personal', 'missing', 'base-to-new' or 'leave-one-domain-out'",
    "run --robust krum": "'multi-krum'",
    "run --device gpu": "it must be auto, cpu, cuda or cuda:NUMBER",
    "compare --methods linear,fedporx": "did you mean 'fedprox'?",
    "reproduce fst-cbdg/table9": "fedvl reproduce --list shows all",
    "data show cifar": "did you mean cifar10 or cifar100?",
    "methods liner": "did you mean 'linear'?",
    # settings by other names, of other kinds, out of range
    "run --set training.lr=0.1": "did you mean 'training.learning_rate'?",
    "run --set lr=0.1": "did you mean 'training.learning_rate'?",
    "run --set method.epochs=5": "did you mean 'training.local_epochs'?",
    "run --set rounds=5": "did you mean 'federation.rounds'?",
    "run --set training.optimizer=adam": "did you mean 'training.optimiser'?",
    "run --set training.learning_rate": "--set takes SECTION.KEY=VALUE, for example --set training.learning_rate=0.1",
    "run --set training.learning_rate=fast": "it must be a valid number",
    "run --set model=fedvl-tiny": "'model' is a section; name one of its settings: model.name",
    "run --rounds -1": "'federation.rounds' is -1, but it must be greater than or equal to 0",
    "run --partition dirichlet": "for example dirichlet:0.3",
    "run --privacy client": "for example client:eps=3",
    "run --per-round 50 --clients 10": "lower --per-round, or raise --clients",
    "run --clients 5000": "5000",
    # things that do not go together
    "run --protocol open": "use --protocol closed, or fed-mp or fedclip",
    "run --method fed-prime --model fedvl-tiny": "use --model fedvl-tiny-vilt",
    "run --missing text:0.5": "use fed-prime or fedavg-p",
    "run --secure-sum --clients 2": "federation.least_clients is 3",
    "run --set training.learning_rate=1e6 --shots 5": "Training diverged in round 1: .*; lower the learning rate",
    # images
    "run --dataset nowhere": "no dataset, folder or file 'nowhere'",
    "run photos": "to use a folder of images, say --dataset photos",
    "run --dataset photos/cat": "make one sub-folder for each class, or name the classes (--classes cat,dog)",
    "run --dataset phone": 'has no images that FedVL reads (2 HEIC); pip install "pillow-heif>=1.1" for HEIC, or save',
    "run --dataset album": "has only one class, 'cat'; at least two classes are needed",
    "run --dataset photos --classes cat,unicorn": "'photos' has no class 'unicorn'; it has 'cat', 'dog'",
    "run --dataset photos/cat --classes cat,dog": "use fst-cbdg or fedpp",
    # runs
    "report nowhere": "There is no run in nowhere; give the folder of one, such as runs/NAME",
    "predict nowhere photos": "There is no run in nowhere; give the folder of one, such as runs/NAME",
    "resume nowhere": "There is no run in nowhere; start one with fedvl run --out nowhere",
    "export stopped out": "The run in stopped is not finished; go on with it by fedvl resume stopped",
    "run --out done": "done exists already; go on with it by fedvl resume done, or choose another --out",
    "predict done nowhere": "There is no",
    "predict done photos --classes cat,zebra": "knows only the classes that it was trained on (airplane,",
    "predict done photo.png": "None of the 1 images can be used; the first because it is not an image of a known format",
    "predict done empty": "There are no images in empty; give files such as photo.jpg",
    "predict done photos --unsure 80": "--unsure is a share between 0 and 1, such as 0.8, and not 80",
    "predict done photos --client 3": "clients have no model of their own; leave out the client",
    "predict photos photos": "There is no run in photos; give the folder of one, such as runs/NAME",
    "export done photos": "photos exists already; choose another folder",
    "evaluate done --dataset nowhere": "There is no folder or file nowhere; give the path of your images",
    "report done done --images": "--images shows the test images of one run; name one",
    "report done --out x.html": "--out is for several runs; the page of one is report.html in its folder",
    "report photo.png": "photo.png is not the folder of a run or comparison; give one, such as runs/NAME",
    "resume stopped --settings-sha256 abc": "stopped/config.toml does not have the SHA-256 abc",
    "withdraw done zero": "The run in done has no client 'zero'; its clients are 0 to 9",
    "log done --to excel": "--to is tensorboard or mlflow or wandb, not 'excel'",
    "audit nowhere": "nowhere is neither the folder of a run nor a TOML file of settings; give one of them",
    "audit verify nowhere": "There is no log nowhere; give the folder of a client, or of a federation at its server",
    "update done --dataset photos": "use ridge or gda, or add the images to the dataset and use fedvl run",
    # serving
    "serve done --token abc": "3 characters, fewer than 16, and can be guessed; give --token",
    "serve done --certificate absent.pem": "TLS needs both files: --certificate FILE and --key FILE",
    "serve done --example photo.png": "photo.png cannot be the example image (it is not an image.*); give another as --example",
    "serve done --reports photo.png/reports": "Cannot write reports to photo.png/reports (Not a directory); name another",
    # files of settings, and values
    "run absent.toml": "There is no experiment file absent.toml; check the path",
    "run bad.toml": "bad.toml is not valid TOML",
    "run typo.toml": "There is no setting 'data.clint'; did you mean 'data.clients'?",
    "run --set training.learning_rate=0,1": "'training.learning_rate' is '0,1', but it must be a valid number",
    "run --partition dirichlet:0": "needs a positive number after the colon, for example dirichlet:0.3",
    "run --partition disjunct": "use iid, even, dirichlet:ALPHA",
    "run --device cuda:99": "cannot be used on this machine; use --device cpu, or auto",
    "run --privacy eps=3": "for example client:eps=3 or record:eps=8",
    "run --privacy client:eps=-1": "'privacy.epsilon' is -1.0, but it must be greater than 0",
    "run --dropout 2": "'federation.dropout' is 2.0, but it must be less than 1",
    "run --unsure 80": "'evaluation.unsure' is 80.0, but it must be less than 1",
    "run --attack flipp:2": "An attack is KIND:SHARE, such as scaled:0.2, not 'flipp:2'",
    "run --set federation.patience=3": "add --set evaluation.validation=0.2, or leave it out",
    "run --set data.unit=patient": "use --privacy record:eps=3, or leave it out",
    "run --from nowhere": "There is no run in nowhere; give the folder of one, such as runs/NAME",
    "run --classes @absent.txt": "Cannot read class names from absent.txt; give a text file with one per line",
    "run --classes ,": '--classes takes names such as "cat,dog", or @FILE with one per line',
    "compare": "Name the methods (--methods linear,fst-cbdg), or give a TOML file of rows and columns",
    "sweep --method linear": "give a setting several values, as in --set training.learning_rate=0.01,0.1",
    # folders and tables
    "run --dataset empty": "has no images in class folders; expected CLASS/image.jpg",
    "run --dataset half": "has only one class, 'cat'; at least two classes are needed",
    "run --dataset two": "fell in the fifth that is held out by content.*add images of it",
    "run --dataset photos --classes cat": "data.classes has one name, 'cat'; name two or more classes",
    "run --dataset german.csv": "has no `path`; name the column of image files so (its columns: 'dateiname, diagnose')",
    "run --dataset unlabelled.csv": "has no labels; put them in a column `label`, or the images in class folders",
    "run --dataset empty.csv": "lists no images; write one row per image with the columns path, label, text, split",
    "run --dataset head.csv": "lists no images; write one row per image with the columns path, label, text, split",
    "run --dataset old.csv": "it is not in UTF-8; save it so (in Excel: as CSV UTF-8)",
    "run --dataset excel.xlsx": "(in Excel: save as CSV UTF-8)",
    "run --dataset photos --labels absent.csv": "absent.csv cannot be read as a CSV file in UTF-8 (No such file",
    "run --dataset photos --labels labels.csv": "names 'not-there.png', which 'photos' does not have; write names as test.csv",
    "run --dataset photos --labels other.csv": "gives cat/0.png the label 'horse', but 'photos' has other classes.*correct it",
    "run --dataset photos --labels wrong.csv": "has no rows with the columns `file` and `label` (or `truth`); take test.csv",
    "data check empty": "has no images in class folders; expected CLASS/image.jpg",
    # federations
    "federation init fed --clients a,a --method linear": "--clients takes different names of letters",
    "federation init fed --clients ../a,b --method linear": "letters, digits, - and _, for example hospital-a,hospital-b",
    "federation init photos --clients a,b --method linear": "photos",
    "federation approve nowhere": "give the folder that the server's operator handed you",
    "federation admit nowhere x.json": "There is no file x.json; fedvl federation join writes it in the party's folder",
    "federation revoke nowhere a": "make it with fedvl federation init",
    "server nowhere": "There is no federation in nowhere; make one with fedvl federation init nowhere",
    "client nowhere --data photos": "give the folder that the server's operator handed you",
}
# What Typer answers itself: a line that names the flag or the command.
MISTYPED = {
    "rnu": "No such command 'rnu'. Did you mean 'run'?",
    "run --unknown 3": "No such option '--unknown'",
    "run --clients zehn": "Invalid value for '--clients': 'zehn' is not a valid integer",
    "predict done photos --top 0": "Invalid value for '--top': 0 is not in the range x>=1",
    "serve done --port 80000": "Invalid value for '--port': 80000 is not in the range 0<=x<=65535",
    "compare --methods linear --seeds 0": "Invalid value for '--seeds': 0 is not in the range",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, an album of one class, a phone's pictures, a finished and a stopped run."""
    root, noise = tmp_path_factory.mktemp("mistakes"), random.Random(0)
    for name in ("photos/cat", "photos/dog", "album/cat", "phone/cat"):
        (root / name).mkdir(parents=True)
        for index in range(12 if "phone" not in name else 0):
            Image.frombytes("RGB", (8, 8), noise.randbytes(192)).save(root / name / f"{index}.png")
    for name in ("one.HEIC", "two.heic"):
        (root / "phone" / "cat" / name).write_bytes(b"ftypheic")
    (root / "empty").mkdir()
    for name, count in (("half/cat", 3), ("half/dog", 0), ("two/cat", 1), ("two/dog", 1)):
        (root / name).mkdir(parents=True)
        for index in range(count):
            Image.frombytes("RGB", (8, 8), noise.randbytes(192)).save(root / name / f"{index}.png")
    rows = "".join(f"photos/{name}/{index}.png,{name}\n" for name in ("cat", "dog") for index in range(6))
    tables = {
        "german.csv": "Dateiname;Diagnose\nphotos/cat/0.png;cat\n",
        "unlabelled.csv": "path\nphotos/cat/0.png\n",
        "empty.csv": "",
        "head.csv": "path,label\n",
        "excel.xlsx": "PK\x03\x04",
        "labels.csv": "file,truth\nnot-there.png,cat\n",
        "other.csv": "file,truth\ncat/0.png,horse\n",
        "wrong.csv": "a,b\n1,2\n",
        "bad.toml": "[data\nclients = 3\n",
        "typo.toml": "[data]\nclint = 3\n",
        "photo.png": "no picture",
    }
    for name, text in tables.items():
        (root / name).write_text(text)
    (root / "old.csv").write_bytes(f"path,label\n{rows}photos/cat/7.png,Flüsse\n".encode("cp1252"))
    finish(root / "done", RUNS["linear"])
    shutil.copytree(root / "done", root / "stopped")
    (root / "stopped" / "result.json").unlink()
    return root


def files(place: Path) -> list[str]:
    """What lies there; an empty folder of runs is no run."""
    return sorted(str(path) for path in place.rglob("*") if path.name != "runs")


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_answered_by_one_helpful_sentence(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, without_heic: None
) -> None:
    monkeypatch.chdir(place)
    before = files(place)
    answer: Any = CliRunner().invoke(app, command.split()).exception
    assert isinstance(answer, FedVLError), answer
    sentence = str(answer)
    expected = MISTAKES[command].split(".*")
    assert all(words in sentence for words in expected), sentence
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))
    assert len(sentence) < 400
    assert files(place) == before


@pytest.mark.parametrize("command", MISTYPED)
def test_a_flag_or_command_that_is_mistyped_is_named(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "200")
    before = files(place)
    answer = CliRunner().invoke(app, command.split())
    assert answer.exit_code == 2
    assert MISTYPED[command] in " ".join(answer.output.split())
    assert answer.output.count("Did you mean") <= 1
    assert files(place) == before


def test_they_are_a_hundred() -> None:
    assert len(MISTAKES) + len(MISTYPED) >= 100
