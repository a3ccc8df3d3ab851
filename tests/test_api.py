"""The front door from Python: it does what the command line does, to the bit, and tells mistakes in the same words."""

import inspect
import json
import os
import shlex
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from helpers.made_up import make_result, save_run
from PIL import Image
from typer.testing import CliRunner

import fedvl
from fedvl import api
from fedvl.cli import app
from fedvl.commands.run import run as run_command
from fedvl.comparisons.contents import Comparison
from fedvl.config import FLAGS
from fedvl.data.given import png_of
from fedvl.data.images import MAX_ASPECT
from fedvl.data.sources import open_dataset
from fedvl.display import SilentLine
from fedvl.methods import register
from fedvl.methods.linear import Linear
from fedvl.runs.contents import Federation
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment
from fedvl.serve.model import TrainedModel, predict_images
from fedvl.tensors import digest, flatten

SMALL = {"shots": 4, "clients": 3, "rounds": 2, "data.test_shots": 5, "data.minimum": 0}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run that tests only read."""
    return fedvl.run(out=tmp_path_factory.mktemp("finished") / "run", quiet=True, **SMALL)


@pytest.fixture(scope="module")
def linear(folder_of):
    return fedvl.open_run(folder_of("linear"))


def one_sentence(error):
    text = str(error.value)
    assert text.endswith((".", "?"))
    assert "\n" not in text
    return text


def left_behind():
    return sorted(path.name for path in Path().iterdir())


# --- the door itself


def in_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_importing_it_is_light():
    done = in_python(
        "import fedvl, sys; print([m for m in ('torch', 'numpy', 'pydantic', 'rich') if m in sys.modules])"
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_its_functions_are_seen_before_they_are_used():
    done = in_python("import fedvl; print(' '.join(dir(fedvl)))")
    assert {"run", "resume", "open_run", "compare", "FedVLError", "__version__"} <= set(done.stdout.split())
    assert in_python("import fedvl; fedvl.nothing").stderr.strip().endswith("has no attribute 'nothing'")


def test_compare_is_the_function_whatever_was_imported_before():
    """No package may have the name of a function: importing it would take the function's place."""
    done = in_python("import fedvl, fedvl.comparisons.grid, fedvl.runs.experiment; fedvl.run; fedvl.compare([])")
    assert "FedVLError: Name the methods" in done.stderr


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")])
def test_idle_threads_sleep_unless_the_user_says_otherwise(given, expected):
    """Torch's OpenMP says itself what it has read, whether torch is imported by fedvl or beside it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    environment |= {"OMP_DISPLAY_ENV": "true", **given}
    code = "import fedvl; import torch; torch.ones(9).sum()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert f"OMP_WAIT_POLICY = '{expected}'" in done.stderr


def test_arguments_are_the_flags_of_the_command_line():
    ours = set(inspect.signature(fedvl.run).parameters)
    theirs = set(inspect.signature(run_command).parameters)
    assert ours - {"settings", "on_round"} == theirs - {"settings", "as_json", "page"}
    assert set(FLAGS) < ours


# --- the same bits


def test_a_run_is_the_command_lines_to_the_bit():
    words = ["run", "--shots", "4", "--clients", "3", "--rounds", "2", "--out", "there", "--json", "--quiet"]
    words += ["--set", "data.test_shots=5", "--set", "data.minimum=0"]
    done = subprocess.run([sys.executable, "-m", "fedvl.cli", *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    there, here = json.loads(done.stdout), fedvl.run(out="here", quiet=True, **SMALL).figures
    assert here.state_sha256 == there["state_sha256"]
    assert here.confusion == there["confusion"]
    assert np.sum(here.confusion) == 50
    assert here.per_round == there["per_round"]
    assert here.command == there["command"]
    assert Path("here/config.toml").read_bytes() == Path("there/config.toml").read_bytes()
    other = fedvl.run(out="other", quiet=True, **{**SMALL, "seed": 1}).figures
    assert other.state_sha256 != here.state_sha256, "else nothing was compared"


@pytest.fixture
def _odd_torch():
    """What a researcher may have set in the same notebook."""
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(3)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_odd_torch")
def test_what_the_caller_set_in_torch_changes_no_bit_and_stays_set(finished):
    with torch.inference_mode():
        again = fedvl.run(out="again", quiet=True, **SMALL)
        predicted = again.predict(picture(3))
        assert torch.is_inference_mode_enabled()
    assert again.figures.state_sha256 == finished.figures.state_sha256
    assert predicted.score[0] == pytest.approx(finished.predict(picture(3)).score[0])
    assert torch.get_default_dtype() == torch.float64
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_num_threads() == 3


def test_an_interrupted_run_goes_on_to_the_same_bits(monkeypatch, finished):
    class Interrupting(SilentLine):
        def rounds(self, *ignored):
            def stop(record):
                raise KeyboardInterrupt

            return stop

    with monkeypatch.context() as patch:
        patch.setattr(api, "display_here", lambda quiet: Interrupting())
        with pytest.raises(KeyboardInterrupt):
            fedvl.run(out="run", **SMALL)
    with pytest.raises(fedvl.FedVLError) as error:
        fedvl.open_run("run")
    assert "not finished; go on with it by fedvl resume run" in one_sentence(error)
    assert len(list(Path("run/journal").glob("*.json"))) == 1
    went_on = fedvl.resume("run", quiet=True)
    assert went_on.figures.state_sha256 == finished.figures.state_sha256
    assert len(went_on.rounds) == 2
    assert (Path("run") / "report.html").is_file()


def test_what_cannot_be_resumed_is_told():
    with pytest.raises(fedvl.FedVLError) as error:
        fedvl.resume("nowhere")
    assert "no run in nowhere" in one_sentence(error)
    with RunFolder.create(Path("far"), resolve_experiment({}), Federation(federation="clinic", run="1")):
        pass
    with pytest.raises(fedvl.FedVLError) as error:
        fedvl.resume("far")
    assert "between machines" in one_sentence(error)


# --- arguments


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["--set", "training.learning_rte=1"], {"training.learning_rte": 1}),
        (["--set", "training.learning_rate=fast"], {"training.learning_rate": "fast"}),
        (["--set", "data.clients=many"], {"clients": "many"}),
        (["--set", "method.mu=1"], {"method.mu": 1}),
        (["--method", "fedporx"], {"method": "fedporx"}),
        (["--method", "./absent.py"], {"method": Path("absent.py")}),
        (["--preset", "released"], {"preset": "released"}),
        (["--partition", "alphabetical"], {"partition": "alphabetical"}),
        (["--dataset", "no-such-set"], {"dataset": "no-such-set"}),
        (["--device", "quantum"], {"device": "quantum"}),
        (["--clients", "0"], {"clients": 0}),
        (["absent.toml"], {"experiment": "absent.toml"}),
    ],
)
def test_mistakes_are_told_in_the_words_of_the_command_line(words, arguments):
    there = CliRunner().invoke(app, ["run", "--quiet", *words]).exception
    assert isinstance(there, fedvl.FedVLError)
    with pytest.raises(fedvl.FedVLError) as error:
        fedvl.run(quiet=True, **arguments)
    assert one_sentence(error).replace(" absent.py", " ./absent.py") == str(there).replace(" absent.py", " ./absent.py")
    assert not list(Path().rglob("config.toml")), "no half-written run is left"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("client", "did you mean 'clients'?"),
        ("partitions", "did you mean 'partition'?"),
        ("epochs", "did you mean 'local_epochs'?"),
        ("learning_rate", 'it is a setting: give it as **{"training.learning_rate": ...}.'),
        ("test_shots", 'it is a setting: give it as **{"data.test_shots": ...}.'),
        ("xyzzy", "arguments are method, "),
    ],
)
def test_an_unknown_argument_gets_a_hint(wrong, told):
    with pytest.raises(fedvl.FedVLError) as error:
        fedvl.run(**{wrong: 1})
    assert one_sentence(error).startswith(f"There is no argument '{wrong}'; {told}")
    assert left_behind() == []


def test_settings_win_over_flags_and_flags_over_the_file_as_on_the_command_line():
    Path("mine.toml").write_text(
        "seed = 5\n[data]\nclients = 7\n[federation]\nrounds = 4\n[training]\nmomentum = 0.5\n"
    )
    given = api.settings_of({"data.clients": 3, "clients": 4, "rounds": 2, "shots": None}, FLAGS, ())
    assert given == {"data": {"clients": 3}, "federation": {"rounds": 2}}
    config = fedvl.run(Path("mine.toml"), quiet=True, **{**SMALL, "seed": 6}).figures.to_dict()["config"]
    assert (config["seed"], config["data"]["clients"], config["federation"]["rounds"]) == (6, 3, 2)
    assert config["training"]["momentum"] == 0.5


def test_numbers_of_numpy_and_paths_are_taken():
    folder = Path("photos")
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for index in range(12):
            picture(index).save(folder / name / f"{index}.png")
    result = fedvl.run(
        dataset=folder, clients=np.int64(2), rounds=np.int32(1), partition="iid", out=Path("run"), quiet=True,
        **{"training.learning_rate": np.float32(0.5)},
    )  # fmt: skip
    assert result.figures.setting("training", "learning_rate") == 0.5
    assert (result.figures.clients, result.figures.class_names) == (2, ["cat", "dog"])
    assert result.folder == Path("run")


def test_runs_get_names_of_their_own_and_a_taken_folder_is_refused(finished):
    first, second = (fedvl.run(quiet=True, method="zero-shot", **SMALL) for _ in range(2))
    assert [str(each.folder) for each in (first, second)] == [
        "runs/zero-shot-cifar10-mini",
        "runs/zero-shot-cifar10-mini-2",
    ]
    before = (finished.folder / "result.json").read_bytes()
    with pytest.raises(fedvl.FedVLError) as error:
        fedvl.run(out=finished.folder, **SMALL)
    assert "exists already" in one_sentence(error)
    assert (finished.folder / "result.json").read_bytes() == before


# --- the result


def test_figures_and_rounds(finished):
    written = json.loads((finished.folder / "result.json").read_bytes())
    assert finished.accuracy == written["accuracy"] == written["per_round"][-1]
    assert finished.zero_shot_accuracy == written["zero_shot_accuracy"]
    assert finished.figures.to_dict() == written
    assert list(finished.rounds["round"]) == [1, 2]
    assert list(finished.rounds.accuracy) == written["per_round"]


def test_without_pandas_rows_are_lists_of_dicts(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert [each["accuracy"] for each in finished.rounds] == finished.figures.per_round
    (predicted,) = finished.predict(picture(0))
    assert set(predicted) == {"image", "answer", "name", "score", "ranked", "zero_shot", "refused"}
    comparison = api.Comparison(Comparison(kind="table", rows=[], columns=[], cells=[]), Path())
    assert comparison.rows == []
    with pytest.raises(fedvl.FedVLError) as error:
        comparison.to_pandas()
    assert "pip install pandas" in one_sentence(error)


def test_an_answer_below_the_least_share_is_unsure_and_images_can_be_browsed(finished):
    sure, unsure = (finished.predict(picture(0), unsure=least) for least in (0.01, 0.999999))
    assert list(sure["answer"]) == list(sure["name"]) == list(unsure["name"])
    assert list(unsure["answer"]) == ["unsure"]
    assert finished.images_page() == finished.folder / "images.html"
    tested = sum(map(sum, finished.figures.confusion))
    assert (finished.folder / "images.html").read_text("utf-8").count("<li data-file=") == tested


def test_opened_again_it_is_the_same(finished):
    again = fedvl.open_run(str(finished.folder))
    assert again.figures == finished.figures
    assert again.rounds.equals(finished.rounds)
    assert again.predict(picture(1)).equals(finished.predict(picture(1)))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no run in"),
        ("{}", "names no method"),
        ("{", "cannot be read"),
    ],
)
def test_what_is_no_finished_run_is_told(content, told):
    Path("run").mkdir()
    if content is not None:
        Path("run/result.json").write_text(content)
    with pytest.raises(fedvl.FedVLError, match=told) as error:
        fedvl.open_run("run")
    one_sentence(error)


def test_the_report_is_written_again_with_the_same_bytes(finished):
    page = finished.folder / "report.html"
    before = page.read_bytes()
    page.unlink()
    assert finished.report() == page
    assert page.read_bytes() == before


def test_a_result_shows_itself(finished):
    assert repr(finished) == (
        f"<linear on cifar10-mini: {finished.accuracy:.2f} %, zero-shot {finished.zero_shot_accuracy:.2f} %; "
        f"{finished.folder}>"
    )
    cells = [cell.text for cell in html(finished).iter() if cell.tag in ("th", "td")]
    shown = dict(zip(cells[::2], cells[1::2], strict=True))
    assert {label: (text or "").split(" (")[0] for label, text in shown.items()} == {  # before the interval
        "Zero-shot accuracy": f"{finished.zero_shot_accuracy:.2f} %",
        "Federated accuracy": f"{finished.accuracy:.2f} %",
        "Difference": f"{finished.accuracy - finished.zero_shot_accuracy:+.2f} points",
        "Calibration error (ECE)": f"{finished.figures.ece:.2f} %",
        "Calibration error, zero-shot": f"{finished.figures.zero_shot_ece:.2f} %",
        "Rounds": "2",
        "Folder": str(finished.folder),
    }
    assert "McNemar" in (shown["Difference"] or "")


def html(shown):
    """What a notebook shows, parsed: it is well-formed, and has no style that would reach the notebook around it."""
    parsed = ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")
    assert not {"html", "body", "style", "script"} & {element.tag for element in parsed.iter()}
    return parsed


def test_names_are_shown_as_text():
    result, metrics = make_result()
    opened = fedvl.open_run(
        save_run(Path("run"), {**result, "method": "a<b>", "dataset": "<script>x</script>"}, metrics)
    )
    assert html(opened)[0].text == "a<b> on <script>x</script>"
    assert html(opened.chart())[0][1].text == "a<b> on <script>x</script>; dashed: zero-shot"


def test_a_run_without_figures_shows_itself_too():
    result, _ = make_result(rounds=0)
    opened = fedvl.open_run(save_run(Path("run"), {**result, "accuracy": None, "zero_shot_accuracy": None}, []))
    assert (opened.accuracy, opened.zero_shot_accuracy) == (None, None)
    assert "no test images" in repr(opened)
    assert [cell.text for cell in html(opened).iter("td")][:2] == ["—", "—"]
    with pytest.raises(fedvl.FedVLError) as error:
        opened.chart()
    assert "no rounds to draw" in one_sentence(error)


def test_the_chart_is_a_whole_drawing(finished):
    chart = finished.chart()
    path = chart.save("chart.svg")
    drawing = ElementTree.parse(path).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    assert drawing.tag == f"{svg}svg"
    assert drawing[0].tag == f"{svg}style"
    assert len(drawing.findall(f".//{svg}circle")) == 2
    texts = [text.text for text in drawing.iter(f"{svg}text")]
    assert {f"{finished.accuracy:.2f}", f"{finished.zero_shot_accuracy:.2f}"} <= set(texts)
    picture = html(chart)[0][0]
    assert picture.get("src", "").startswith("data:image/svg+xml;base64,")
    assert repr(chart) == "<chart of linear on cifar10-mini; dashed: zero-shot>"


# --- predictions


def picture(row):
    return open_dataset("cifar10-mini", None).splits["test"].read(row)


def test_predictions_are_those_of_the_command_line(linear):
    folder = Path("photos/deep")
    folder.mkdir(parents=True)
    for row in range(5):
        picture(row).save(folder / f"{row}.png")
    model = TrainedModel(RunFolder(linear.folder))
    expected = list(predict_images(model, model.user(), [(str(path), path) for path in sorted(folder.iterdir())], 3))
    predicted = linear.predict("photos")
    assert list(predicted.columns) == ["image", "answer", "name", "score", "ranked", "zero_shot", "refused"]
    assert list(predicted.image) == [line["image"] for line in expected]
    assert list(predicted.ranked) == [[(each["name"], each["score"]) for each in line["ranked"]] for line in expected]
    assert list(predicted.name) == [line["ranked"][0]["name"] for line in expected]
    assert list(predicted.zero_shot) == [line["zero_shot"][0]["name"] for line in expected]
    assert predicted.refused.isna().all()
    files = [str(folder / "1.png"), folder / "0.png"]
    assert list(linear.predict(files).image) == [str(folder / "1.png"), str(folder / "0.png")]
    assert [len(ranked) for ranked in linear.predict(files, top=1).ranked] == [1, 1]


def test_images_in_memory_are_predicted_as_their_files(linear):
    photo = picture(4).resize((60, 40))
    photo.save("photo.png")
    palette, grey = photo.quantize(16), np.asarray(photo.convert("L"))
    palette.save("palette.png")
    Image.fromarray(grey).save("grey.png")
    deep = np.asarray(photo.convert("L")).astype(np.uint16) * 257
    Image.fromarray(deep).save("deep.png")
    clear = photo.convert("RGBA")
    clear.putalpha(100)
    clear.save("clear.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    photo.save("turned.jpg", exif=turned)
    files = linear.predict(["photo.png", "palette.png", "grey.png", "deep.png", "clear.png", "turned.jpg"])
    held = [photo, palette, grey, deep, np.asarray(clear), Image.open("turned.jpg")]
    memory = linear.predict(held)
    assert list(memory.image) == [f"image {number}" for number in range(6)]
    assert list(memory.ranked) == list(files.ranked)
    assert len({str(ranked) for ranked in files.ranked}) == 5, "all differ, but grey of 8 and of 16 bits"
    many = np.stack([np.asarray(photo)] * 2)
    assert list(linear.predict(many).name) == [files.name[0]] * 2
    (alone,) = linear.predict(np.asarray(photo)).score
    assert alone == pytest.approx(files.score[0])
    assert list(linear.predict(photo.convert("CMYK")).name) == [files.name[0]]


def test_more_images_than_are_encoded_together_keep_their_order(linear, monkeypatch):
    held = [picture(row) for row in range(7)]
    whole = linear.predict(held)
    monkeypatch.setattr("fedvl.serve.model.ENCODED_TOGETHER", 3)
    parts = linear.predict(held)
    assert list(parts.name) == list(whole.name)
    np.testing.assert_allclose(list(parts.score), list(whole.score), rtol=1e-4)


def test_an_image_that_cannot_be_used_is_refused_and_the_others_are_predicted(linear):
    Path("text.png").write_text("no image")
    strip = np.zeros((1, MAX_ASPECT + 1, 3), np.uint8)
    predicted = linear.predict([picture(0), "text.png", strip, picture(0)])
    assert list(predicted.refused.notna()) == [False, True, True, False]
    assert "not an image" in predicted.refused[1]
    assert "times its width" in predicted.refused[2]
    assert predicted.name[0] == predicted.name[3]
    assert predicted.ranked[1] == []


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (np.zeros((8, 8, 3)), "An array of float64 and shape (8, 8, 3) is not an image"),
        (np.zeros((3, 8, 8), np.uint8), "shape (3, 8, 8) is not an image"),
        (np.zeros((0, 0, 3), np.uint8), "is not an image"),
        (np.zeros((8, 8, 3), np.uint16), "is not an image"),
        ([torch.zeros(3, 8, 8)], "A Tensor is not an image"),
        ([b"bytes"], "A bytes is not an image"),
        ([], "no images to predict"),
        ("absent.png", "There is no absent.png"),
    ],
)
def test_what_is_no_image_is_told(linear, images, told):
    with pytest.raises(fedvl.FedVLError) as error:
        linear.predict(images)
    assert told in one_sentence(error)


def test_names_of_ones_own(linear, folder_of):
    open_to_any = fedvl.open_run(folder_of("fed-mp"))
    photo = picture(0)
    predicted = open_to_any.predict(photo, classes=["steamboat", "songbird"])
    assert {name for name, _ in predicted.ranked[0]} == {"steamboat", "songbird"}
    assert open_to_any.predict(photo, classes="steamboat, songbird").equals(predicted)
    with pytest.raises(fedvl.FedVLError) as error:
        linear.predict(photo, classes=["steamboat"])
    assert "knows only the classes that it was trained on" in one_sentence(error)
    with pytest.raises(fedvl.FedVLError) as error:
        linear.predict(photo, top=0)
    assert "At least one" in one_sentence(error)


def test_a_clients_own_model_and_a_device(linear, folder_of):
    personal = fedvl.open_run(folder_of("fedpp"))
    scores = [personal.predict(picture(2), client=client, top=10).score[0] for client in (0, 1)]
    assert scores[0] != scores[1]
    with pytest.raises(fedvl.FedVLError) as error:
        linear.predict(picture(2), client=0)
    assert "no model of their own" in one_sentence(error)
    with pytest.raises(fedvl.FedVLError) as error:
        linear.predict(picture(2), device="quantum")
    assert "quantum" in one_sentence(error)


# --- comparisons


def small_comparison(methods, **more):
    return fedvl.compare(methods, **{"quiet": True, "seeds": 2, "references": False, **SMALL, **more})


def test_a_comparison_is_a_table_and_a_frame():
    comparison = small_comparison(["zero-shot", "linear"], partition=["iid", "dirichlet:0.1"], out="both")
    table = comparison.to_pandas()
    assert list(zip(table.row, table.column, strict=True)) == [
        (method, split) for method in ("zero-shot", "linear") for split in ("iid", "dirichlet:0.1")
    ]
    assert list(table.n) == [2] * 4
    for line in comparison.rows:
        found = [fedvl.open_run(folder) for folder in line["runs"]]
        assert [each.figures.seed for each in found] == [0, 1]
        assert [each.accuracy for each in found] == line["values"]
        assert line["mean"] == np.mean(line["values"])
    assert table["values"][2] != table["values"][0]
    assert repr(comparison).splitlines()[0].split() == ["iid", "dirichlet:0.1"]
    assert repr(comparison).splitlines()[1].startswith("zero-shot")
    shown = html(comparison)
    assert [cell.text for cell in shown.iter("th")] == [None, "iid", "dirichlet:0.1", "zero-shot", "linear"]
    assert len(list(shown.iter("b"))) == sum(table.best) == 2
    page = Path("both/report.html")
    before = page.read_bytes()
    page.unlink()
    assert comparison.report() == page
    assert page.read_bytes() == before


def test_finished_runs_are_not_run_again_and_the_noted_command_gives_the_same():
    first = small_comparison("linear,zero-shot", seeds=1, dataset="cifar10-mini", out="one two")
    runs = {path: path.stat().st_mtime_ns for path in Path("one two/runs").glob("*/result.json")}
    assert len(runs) == 2
    more = small_comparison(
        ["linear", "zero-shot", "fedprox"],
        seeds=1,
        dataset=["cifar10-mini"],
        against="linear",
        style="interval",
        out="one two",
    )
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    assert [line["values"] for line in more.rows[:2]] == [line["values"] for line in first.rows]
    table = Path("one two/table.tex").read_text()
    assert "interval of 95" in table, "and not the deviations"
    assert "against linear, with Holm's correction" in table
    assert [(one.row, one.reference) for one in more.summary.against] == [
        ("zero-shot", "linear"),
        ("fedprox", "linear"),
    ]
    done = CliRunner().invoke(app, [*shlex.split(more.summary.command)[1:], "--quiet"])
    assert done.exit_code == 0, done.output
    assert Path("one two/table.tex").read_text() == table
    assert (
        json.loads(Path("one two/comparison.json").read_bytes())["cells"] == json.loads(more.summary.to_json())["cells"]
    )
    assert len(list(Path("one two/runs").iterdir())) == 3, "the same settings gave the same folders"


def test_a_grid_of_rows_and_columns_from_a_file():
    Path("grid.toml").write_text(
        'seeds = 1\n[rows.plain]\nmethod = {name = "linear"}\n[rows.pulled]\nmethod = {name = "fedprox", mu = 9.0}\n'
    )
    comparison = fedvl.compare(grid="grid.toml", quiet=True, **SMALL)
    assert [line["row"] for line in comparison.rows] == ["plain", "pulled", "zero-shot", "ridge"]
    assert comparison.summary.command.startswith("fedvl compare grid.toml --seeds 1 --set data.")
    assert comparison.folder == Path("comparisons/comparison")
    with pytest.raises(fedvl.FedVLError) as error:
        fedvl.compare(grid="grid.toml", dataset="emoji-mini")
    assert "its columns" in one_sentence(error)


@pytest.mark.parametrize(
    ("methods", "more", "told"),
    [
        ([], {}, "Name the methods"),
        ("linear", {"grid": "grid.toml"}, "Name the methods"),
        (["linear", "fedporx"], {}, "did you mean 'fedprox'"),
        (["linear", "./absent.py"], {}, "no method file absent.py"),
        ("linear", {"seeds": 0}, "at least once, and not 0"),
        ("linear", {"seeds": "three"}, "at least once, and not 'three'"),
        ("linear", {"style": "bold"}, "is mean-std or interval, not 'bold'"),
        ("linear", {"against": "fedprox"}, "no row 'fedprox' to compare with; rows are linear, zero-shot, ridge"),
        ("linear", {"seed": 3}, "no argument 'seed'; did you mean 'seeds'?"),
        ("linear", {"method": "fedprox"}, "no argument 'method'; did you mean 'methods'?"),
        ("linear", {"training.learning_rte": 1}, "did you mean 'training.learning_rate'?"),
        ("linear", {"momentum": 1}, '**{"training.momentum": ...}'),
        ("linear", {"clients": "many"}, "'data.clients' is 'many'"),
    ],
)
def test_mistakes_in_a_comparison_are_told_before_anything_is_run(methods, more, told):
    with pytest.raises(fedvl.FedVLError) as error:
        fedvl.compare(methods, quiet=True, **more)
    assert told in one_sentence(error)
    assert left_behind() == []


def test_runs_that_fail_are_told_after_the_others_have_run():
    Path("mine.py").write_text(
        "from fedvl.methods.linear import Linear\n\n\nclass Mine(Linear):\n"
        "    def loss(self, tensors, batch):\n        raise ValueError('a mistake of mine.')\n"
    )
    with pytest.raises(fedvl.FedVLError) as error:
        small_comparison(["./mine.py", "linear"], out="both")
    told = one_sentence(error)
    assert told.startswith(
        "2 of 4 runs failed; the first is ./mine.py, seed 0: mine.py, line 6, in loss: `raise ValueError("
    )
    assert [cell["row"] for cell in json.loads(Path("both/comparison.json").read_bytes())["cells"]] == ["linear"]


def test_a_png_loses_nothing():
    exact = np.random.default_rng(0).integers(0, 256, (9, 7, 4), np.uint8)
    np.testing.assert_array_equal(np.asarray(Image.open(BytesIO(png_of(exact)))), exact)


def test_the_state_of_a_method_that_shares_nothing_is_hashed_too(folder_of):
    """Tried on version 0.1: FedPP without visual prompts had the hash of nothing."""
    figures = fedvl.open_run(folder_of("fedpp")).figures
    folder = RunFolder(folder_of("fedpp"))
    shared, _ = folder.tensors()
    assert shared == {}
    private = folder.state().private
    assert private
    assert figures.state_sha256 == digest(flatten(private))
    linear = RunFolder(folder_of("linear"))
    assert linear.result.state_sha256 == digest(linear.tensors()[0])


# --- Python objects


class Doubled(Linear):
    """A method whose class exists in this process alone."""

    def loss(self, tensors, batch):
        return 2 * super().loss(tensors, batch)


ROWS = [list(range(20)), list(range(20, 36)), [36, 37, 38, 39]]


def small_images(count, seed):
    """Bright images of one class, and dark ones of the other."""
    values = np.random.default_rng(seed).integers(0, 60, (count, 16, 16, 3), dtype=np.uint8)
    values[::2] += 180
    return values, ["white" if row % 2 == 0 else "black" for row in range(count)]


@pytest.fixture(scope="module")
def of_objects(tmp_path_factory):
    """A run of a class, arrays and rows by client, with a function that looks at it; and what it saw."""
    seen = []

    def spy(record, shared, private):
        seen.append((record.round, {name: tensor.clone() for name, tensor in shared.items()}))
        shared["weight"].zero_()
        torch.manual_seed(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVL_CACHE", str(tmp_path_factory.mktemp("cache")))
        dataset = (*small_images(40, 0), *small_images(12, 1))
        arguments = {"method": Doubled, "dataset": dataset, "partition": ROWS, "rounds": 2, "quiet": True}
        out = tmp_path_factory.mktemp("objects")
        watched = fedvl.run(out=out / "watched", on_round=spy, **arguments)
        plain = fedvl.run(out=out / "plain", **arguments)
        yield watched, plain, seen


def test_a_class_arrays_and_rows_are_run_and_watching_changes_no_bit(of_objects):
    watched, plain, seen = of_objects
    assert watched.figures.state_sha256 == plain.figures.state_sha256
    assert [number for number, _ in seen] == [1, 2]
    assert torch.equal(seen[1][1]["weight"], watched.tensors()["weight"])
    assert not torch.equal(seen[0][1]["weight"], seen[1][1]["weight"])
    assert repr(watched).startswith("<Doubled on ")


def test_a_result_has_its_clients_predictions_and_tensors(of_objects):
    watched = of_objects[0]
    clients = watched.clients
    assert list(clients["images"]) == [20, 16, 4]
    assert list(clients["white"]) == [10, 8, 2]
    assert len(watched.predictions) == 12
    right = sum(row.truth == row.prediction for row in watched.predictions.itertuples())
    assert watched.accuracy == pytest.approx(100 * right / 12)
    assert watched.tensors(client=1) == {}
    with pytest.raises(fedvl.FedVLError, match="keeps the tensors of round 2, its last, and not those of round 1"):
        watched.tensors(round=1)
    with pytest.raises(fedvl.FedVLError, match="has no client 3"):
        watched.tensors(client=3)


def test_a_client_has_its_private_tensors_and_last_update(folder_of):
    personal = fedvl.open_run(folder_of("fedpp"))
    state = RunFolder(personal.folder).state()
    for client in (0, 1):
        wanted = {**state.last.get(client, {}), **state.private.get(client, {})}
        assert wanted
        assert digest(personal.tensors(client=client)) == digest(wanted)
    assert digest(personal.tensors(client=0)) != digest(personal.tensors(client=1))


def test_a_result_exports_its_model(of_objects, tmp_path):
    folder = of_objects[0].export(tmp_path / "exported")
    assert json.loads((folder / "classes.json").read_text(encoding="utf-8")) == ["black", "white"]


def test_the_class_of_a_run_of_another_process_is_asked_for_and_can_be_given_again(of_objects, monkeypatch):
    folder = of_objects[1].folder
    monkeypatch.setattr("fedvl.methods.CLASSES", {})
    with pytest.raises(
        fedvl.FedVLError, match=r"Doubled was given as a Python class.*open_run\(folder, method=Doubled\)"
    ):
        fedvl.open_run(folder).predict(small_images(1, 2)[0])
    assert len(fedvl.open_run(folder, method=Doubled).predict(small_images(1, 2)[0])) == 1


def test_a_class_whose_code_changed_is_another():
    class Doubled(Linear):  # the same name
        def loss(self, tensors, batch):
            return 3 * super().loss(tensors, batch)

    assert register(Doubled).startswith("Doubled@")
    assert register(Doubled) == register(Doubled) != register(globals()["Doubled"])


def test_a_run_whose_watcher_fails_goes_on_from_its_last_round(tmp_path, finished):
    def fail(record, shared, private):
        raise ValueError("no disk")

    with pytest.raises(fedvl.FedVLError, match="on_round=fail failed after round 1 with ValueError: no disk"):
        fedvl.run(out=tmp_path / "run", quiet=True, on_round=fail, **SMALL)
    rounds = []
    again = fedvl.resume(tmp_path / "run", quiet=True, on_round=lambda record, *tensors: rounds.append(record.round))
    assert rounds == [2]
    assert again.figures.state_sha256 == finished.figures.state_sha256


def test_classes_are_compared_in_this_process_alone(tmp_path):
    with pytest.raises(fedvl.FedVLError, match="Doubled was given as a class, which other processes do not know"):
        fedvl.compare([Doubled, "linear"], jobs=2)
    with pytest.raises(fedvl.FedVLError, match="at least one, and not 0"):
        fedvl.compare(["linear"], jobs=0)
    found = fedvl.compare([Doubled], seeds=1, references=False, out=tmp_path / "cmp", quiet=True, **SMALL)
    assert [row["row"] for row in found.rows] == [register(Doubled)]
    assert fedvl.open_comparison(tmp_path / "cmp").rows == found.rows


def test_a_sweep_is_that_of_the_command_line(tmp_path):
    """The same runs, which the command then finds finished, and the same choice."""
    out = tmp_path / "sweep"
    swept = fedvl.sweep(method="linear", tune={"training.learning_rate": [0.01, 0.1]}, out=out, quiet=True, **SMALL)
    (chosen,) = [row["row"] for row in swept.rows if row["chosen"]]
    written = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    words = shlex.split(written["command"])
    done = CliRunner().invoke(app, [*words[1:], "--quiet"])
    assert done.exit_code == 0, done.output
    again = fedvl.open_comparison(out)
    assert [row["values"] for row in again.rows] == [row["values"] for row in swept.rows]
    assert again.summary.opening == swept.summary.opening
    assert [row["row"] for row in again.rows if row["chosen"]] == [chosen]


def test_a_folder_without_a_comparison_is_refused(tmp_path):
    with pytest.raises(fedvl.FedVLError, match="There is no comparison in"):
        fedvl.open_comparison(tmp_path)


def test_a_run_that_does_not_beat_zero_shot_warns_and_says_so_in_its_report(tmp_path):
    still = {**SMALL, "training.learning_rate": 1e-9, "rounds": 1}
    with pytest.warns(UserWarning, match=r"Not better than zero-shot beyond chance .*--preset embedded"):
        result = fedvl.run(out=tmp_path / "run", **still)
    (said,) = [line for line in result.remarks if "zero-shot" in line]
    assert said.split("(")[0] in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
