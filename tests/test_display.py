"""Progress: lines and bars in a terminal, one line that is rewritten in a notebook; standard output stays clean."""

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.contents import record_of
from helpers.forked import SMALL, in_child
from rich.table import Table
from rich.text import Text

import fedvl.display
from fedvl.display import (
    BETWEEN_LINES,
    Console,
    GridDisplay,
    NotebookDisplay,
    SilentLine,
    TerminalDisplay,
    display_here,
    duration,
    figure_of,
    shortened,
    visible,
    when_slow,
)

RECORDS: list[dict[str, Any]] = [{"round": 1, "accuracy": 61.5}, {"round": 2}, {"round": 3, "accuracy": 70.0}]


# --- a terminal


def progress(display):
    with display:
        encoded = display.stage("Images")
        encoded(1, 2)
        encoded(2, 2)
        done = display.rounds(3, [], 50.0)
        for record in RECORDS:
            done(record_of(record))


def test_where_there_is_no_terminal_a_line_is_written_for_each_round(capsys):
    progress(TerminalDisplay())
    out, error = capsys.readouterr()
    assert out == ""
    assert error.splitlines() == [
        "round 1/3  61.50 %, zero-shot 50.00 %",
        "round 2/3  ",
        "round 3/3  70.00 %, zero-shot 50.00 %",
    ]


def test_a_long_stage_is_told_every_ten_seconds_with_the_time_that_is_left(capsys, monkeypatch):
    clock = iter([0.0, 0.0, 4.0, 12.0, 15.0, 24.0])
    monkeypatch.setattr("fedvl.display.time.monotonic", lambda: next(clock))
    with TerminalDisplay() as display:
        report = display.stage("This round")
        for done in (1, 2, 6, 7, 12):
            report(done, 60)
    assert capsys.readouterr().err.splitlines() == [
        "this round 6/60, about 1 min 48 s left",
        "this round 12/60, about 1 min 36 s left",
    ]


def test_a_short_piece_of_work_is_not_shown(monkeypatch):
    now, shown = 0.0, []
    monkeypatch.setattr("fedvl.display.time.monotonic", lambda: now)
    report = when_slow(lambda done, total: shown.append((done, total)))
    for done, at in ((1, 0.0), (2, 1.9), (3, 2.0), (1, 2.1), (2, 4.0), (3, 4.2)):  # two rounds of three steps
        now = at
        report(done, 3)
    assert shown == [(3, 3), (3, 3)]


def test_durations_in_words():
    assert [duration(s) for s in (0.4, 59.4, 61, 3600, 7260)] == ["0 s", "59 s", "1 min 1 s", "1 h 0 min", "2 h 1 min"]


def test_a_long_detail_loses_its_middle_and_leaves_room_for_the_bar():
    assert shortened("seed 0: round 10/10", 34) == "seed 0: round 10/10"
    short = shortened("learning_rate 0.01, validation accuracy, seed 0: round 10/10", 34)
    assert short == "learning_rate 0.01,…0: round 10/10"
    assert len(short) == 34


def test_in_a_terminal_there_are_bars_and_no_lines(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    progress(TerminalDisplay())
    out, error = capsys.readouterr()
    assert out == ""
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", error)
    assert "━" in shown
    assert re.search(r"Images +━+ 2/2", shown)
    assert re.search(r"Rounds +━+ 3/3 +70.00 %, zero-shot 50.00 %", shown)
    assert "round 1/3" not in shown


def test_quiet_shows_nothing(capsys):
    progress(TerminalDisplay(quiet=True))
    progress(display_here(quiet=True))
    assert capsys.readouterr() == ("", "")


def test_a_run_that_goes_on_says_so(capsys):
    with TerminalDisplay() as display:
        display.rounds(5, [record_of({"round": 1}), record_of({"round": 2})], None)
    assert capsys.readouterr().err == "Continuing after round 2 of 5.\n"


# --- which


def shell(**attributes):
    """IPython, as it is when it runs something."""
    return SimpleNamespace(get_ipython=lambda: SimpleNamespace(**attributes))


@pytest.mark.parametrize(
    ("ipython", "kind"),
    [
        (None, TerminalDisplay),
        (SimpleNamespace(get_ipython=lambda: None), TerminalDisplay),  # imported by something, and running nothing
        (shell(), TerminalDisplay),  # IPython in a terminal
        (shell(kernel=object()), NotebookDisplay),
    ],
)
def test_the_display_fits_where_python_runs(monkeypatch, ipython, kind):
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())  # which whoever starts kernels imports too
    assert type(display_here()) is kind
    assert type(display_here(quiet=True)) is SilentLine


# --- a notebook


class Page:
    """Where a notebook's lines arrive, and a clock."""

    def __init__(self):
        self.lines, self.made, self.now = [], 0, 1000.0

    def display(self, content, raw, display_id):
        assert raw
        assert display_id
        self.made += 1
        self.update(content, raw)
        return self

    def update(self, content, raw):
        assert raw
        self.lines.append(content["text/plain"])


@pytest.fixture
def page(monkeypatch):
    page = Page()
    monkeypatch.setattr("IPython.display.display", page.display)
    monkeypatch.setattr("fedvl.display.time", SimpleNamespace(monotonic=lambda: page.now))
    return page


def test_a_notebook_has_one_line_that_is_rewritten(page):
    with NotebookDisplay() as display:
        for done, name in enumerate(("Images", "Texts")):
            page.now += 1
            display.show(name, done, 2)
        page.now += 1
        show = display.rounds(3, [], 50.0)
        for record in RECORDS:
            page.now += 1
            show(record_of(record))
    assert page.made == 1
    assert page.lines == [
        "Images 0/2",
        "Texts 1/2",
        "Rounds 0/3",
        "Rounds 1/3  61.50 %, zero-shot 50.00 %",
        "Rounds 2/3",
        "Rounds 3/3  70.00 %, zero-shot 50.00 %",
    ]


def test_a_notebook_is_not_flooded_and_always_shows_the_end(page):
    with NotebookDisplay() as display:
        for done in range(1001):
            page.now += BETWEEN_LINES / 100
            display.show("Rounds", done, 1000)
        assert 5 <= len(page.lines) <= 11
    assert page.lines[-1] == "Rounds 1000/1000"
    assert page.made == 1


def test_a_notebook_shows_the_last_line_where_a_run_fails_and_none_where_nothing_began(page):

    def fails(rounds):
        with NotebookDisplay() as display:
            for number in rounds:
                display.show("Rounds", number, 9)
            raise ValueError

    with pytest.raises(ValueError):
        fails([1, 2])
    assert page.lines == ["Rounds 1/9", "Rounds 2/9"]
    with pytest.raises(ValueError):
        fails([])
    assert page.made == 1


def executed(cells, folder):
    """A notebook of these cells as a real kernel leaves it, and what kinds of messages each cell sent."""
    import nbclient
    import nbformat

    kinds: list[list[str]] = [[] for _ in cells]

    class Recording(nbclient.NotebookClient):
        def process_message(self, message, cell, cell_index):
            kinds[cell_index].append(message["msg_type"])
            return super().process_message(message, cell, cell_index)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    Recording(notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in notebook.cells], kinds


def test_in_a_real_kernel_a_run_has_one_display_that_is_rewritten(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    small = '{"shots": 4, "clients": 3, "rounds": 3, "data.test_shots": 5, "data.minimum": 0}'
    cells = [
        f"import fedvl; small = {small}; result = fedvl.run(**small)",
        "fedvl.run(quiet=True, **small)",
        "fedvl.run(clients=0)",
        "table = fedvl.compare(['zero-shot', 'linear'], seeds=1, **small)",
        "table",
    ]
    (run, quiet, refused, compared, table), kinds = executed(cells, tmp_path)

    assert [output.output_type for output in run] == ["display_data", "stream"]
    assert "Not better than zero-shot beyond chance" in run[1].text, "four images of a class are few"
    assert run[0].data.keys() == {"text/plain"}
    assert re.fullmatch(r"Rounds 3/3  +[\d.]+ %, zero-shot [\d.]+ %", run[0].data["text/plain"])
    assert kinds[0].count("display_data") == 1
    assert "update_display_data" in kinds[0], "rewritten"

    assert [output.output_type for output in quiet] == ["execute_result"]
    assert "Federated accuracy" in quiet[0].data["text/html"]

    assert [output.output_type for output in refused] == ["error"]
    assert refused[0].ename == "FedVLError"
    assert "'data.clients' is 0" in refused[0].evalue

    assert [output.output_type for output in compared] == ["display_data"]
    assert compared[0].data["text/plain"].startswith("Runs 3/3  ridge, accuracy, seed 0: "), (
        "the reference row comes last"
    )

    assert [output.output_type for output in table] == ["execute_result"], "nothing is printed beside it"
    assert table[0].data["text/html"].startswith("<table>")


# --- many runs


class Shared:
    """A display that notes what many runs show on it."""

    def __init__(self):
        self.shown, self.logged = [], []

    def show(self, name, done, total, detail=""):
        self.shown.append((name, done, total, detail))

    def log(self, text):
        self.logged.append(text)


def test_no_time_is_given_for_what_is_waited_for(capsys):
    """A terminal's bar has no remaining time until rounds go on; each display says whom it waits for."""
    display = TerminalDisplay()
    display.show("Rounds", 2, 4)
    (task,) = display.progress.tasks
    column: Any = display.progress.columns[-1]
    display.waiting("Waiting for north.")
    assert "Waiting for north." in capsys.readouterr().err
    assert column(task).plain == ""
    display.show("Rounds", 3, 4)
    assert column(task).plain != ""
    shared = Shared()
    grid = GridDisplay(shared)
    grid.waiting("Waiting for north.")
    assert shared.shown[-1][-1].endswith("Waiting for north.")


def test_a_grid_shows_each_run_and_logs_it_when_it_ends():
    shared = Shared()
    grid = GridDisplay(shared)
    grid.begin("linear, iid, seed 0", 0, 2)
    grid.stage("Images")(5, 10)
    grid.rounds(3, [])(record_of({"round": 2}))
    grid.end("71.2 (0.4 s)", 1, 2)
    assert shared.shown == [
        ("Runs", 0, 2, "linear, iid, seed 0"),
        ("Runs", 0, 2, "linear, iid, seed 0: images 5/10"),
        ("Runs", 0, 2, "linear, iid, seed 0: round 2/3"),
        ("Runs", 1, 2, "linear, iid, seed 0: 71.2 (0.4 s)"),
    ]
    assert shared.logged == ["[1/2] linear, iid, seed 0: 71.2 (0.4 s)"]


@pytest.mark.parametrize(
    ("record", "zero_shot", "text"),
    [
        ({"accuracy": 7.125}, 50.0, " 7.12 %, zero-shot 50.00 %"),
        ({"accuracy": 70.0}, None, "70.00 %"),
        ({}, 50.0, ""),
        ({"accuracy": None}, 50.0, ""),
    ],
)
def test_the_figure_of_a_round(record, zero_shot, text):
    assert figure_of(record_of(record), zero_shot) == text


# --- names that a terminal would obey


def test_what_cannot_be_seen_is_written_as_an_escape():
    name = "\x1b[2Jcat\x07 \u202edog\x9b \ud800\r"
    assert visible(name) == "\\x1b[2Jcat\\x07 \\u202edog\\x9b \\ud800\\r"
    assert visible("é\t猫 \N{SNOWMAN}\n") == "é\t猫 \N{SNOWMAN}\n"


def test_a_terminal_obeys_no_name():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, color_system="standard")
    table = Table("name", box=None)
    table.add_row(Text("a\x1b[2Jb"), style="bold")
    console.print(table)
    console.print("c\x1b]0;title\x07", markup=False)
    assert "a\\x1b" in out.getvalue()
    assert "c\\x1b" in out.getvalue()
    assert re.findall("\x1b.", out.getvalue()), "styles are still shown"
    assert not re.search("\x1b(?!\\[[0-9;]*m)|\x07", out.getvalue())


# --- texts that look like markup

MARKED = 'install it with pip install "fedvl[privacy]", [bold]not[/bold] [red]red :dog:'


def test_no_text_is_taken_for_markup():
    text = io.StringIO()
    console = Console(file=text, width=120)
    table = Table(MARKED, title=MARKED)
    table.add_row(MARKED)
    table.add_row(Text(MARKED, "bold"))
    for each in (MARKED, table):
        console.print(each)
    assert text.getvalue().count(MARKED) == 5
    display = TerminalDisplay()
    display.show("[privacy]", 1, 2, "[1/2] :dog:")
    console.print(display.progress.make_tasks_table(display.progress.tasks))
    assert re.search(r"\[privacy\] .* \[1/2\] :dog:", text.getvalue())


def test_no_other_console_is_made():
    """What is printed goes through the one that takes texts as they are."""
    package = Path(fedvl.display.__file__).parent
    lines = [
        line.strip()
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"import .*\bConsole\b", line)
    ]
    assert len(lines) > 5
    assert all(line.startswith("from fedvl.display import") for line in lines), lines


def test_brackets_in_what_commands_print(tmp_path):
    """Real commands: a folder of that name, a note, and an error."""
    name = "fedvl[privacy]"
    ended = in_child(tmp_path, "run", *SMALL[:-4], "--rounds", "1", "--out", name, *SMALL[-2:])
    assert ended.code == 0, ended.error
    assert f"Report: {name}/report.html" in ended.out
    refused = in_child(tmp_path, "resume", f"{name}[bold]")
    assert refused.error == f"Error: There is no run in {name}[bold]; start one with fedvl run --out {name}[bold].\n"
    long = in_child(tmp_path, "data", "show", f"hf:{'x' * 10_000}[red]")
    assert (long.code, len(long.error) < 5000) == (2, True)
