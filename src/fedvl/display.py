"""Progress on standard error, so that standard output stays clean for tables and JSON."""

import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from rich import console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

A_WHILE = 2.0  # seconds of work after which it is worth a bar of its own
BESIDE = 46  # columns of a line of progress that its detail leaves to the name, the bar, the count and the time
TAIL_LENGTH = 14  # characters at the end of a detail, which say how far it is
BETWEEN_LOGS = 10.0  # seconds, where there is no terminal
BETWEEN_LINES = 0.1  # seconds; a notebook's server drops messages that come too fast
# Control characters (a terminal obeys some), those that turn the direction of a text, and halves of characters
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return a text whose unseen characters are written as escapes, but for tabs and new lines."""
    return UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def csv_cell(value: object) -> object:
    """Return a value for CSV; put a quote before a name that would run as a formula."""
    if not isinstance(value, str):
        return value
    return f"'{visible(value)}" if value.startswith(("=", "+", "-", "@", "\t")) else visible(value)


class Console(console.Console):
    """A terminal that shows what texts hold, and obeys nothing in them: no markup, no emoji codes.

    A style is given by ``rich.text.Text``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, *given: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*given, **options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class Measured(Protocol):
    """What is shown of a round."""

    @property
    def round(self) -> int: ...

    @property
    def accuracy(self) -> float | None: ...

    @property
    def validation(self) -> float | None: ...


class Display(Protocol):
    """Where progress is shown."""

    def stage(self, name: str) -> Callable[[int, int], None]: ...

    def waiting(self, text: str) -> None:
        """Say what is waited for; how long it will take is not known."""

    def rounds(
        self, total: int, records: Sequence[Measured], zero_shot_accuracy: float | None
    ) -> Callable[[Measured], None]: ...


class Silent:
    """A display that shows nothing."""

    def stage(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: None

    def waiting(self, text: str) -> None:
        return

    def rounds(self, *ignored: Any) -> Callable[[Measured], None]:
        return lambda record: None


class LineDisplay(Protocol):
    """A display that many runs can share."""

    def show(self, name: str, done: int, total: int | None, detail: str = "") -> None:
        """Show how far a piece of work is."""

    def log(self, text: str) -> None:
        """Note a finished piece of work, where nothing else would stay of it."""


class Remaining(TimeRemainingColumn):
    """The time that is left by the pace so far; nothing while somebody is waited for."""

    max_refresh = 0.0

    def render(self, task: Task) -> Text:
        return Text() if task.fields.get("waiting") else super().render(task)


class TerminalDisplay:
    """A bar for each stage; lines of plain text where there is no terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        self.progress = Progress(
            TextColumn("{task.description:<14}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            Remaining(),
            console=self.console,
            disable=not self.console.is_terminal or quiet,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "TerminalDisplay":
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def show(self, name: str, done: int, total: int | None, detail: str = "") -> None:
        if name not in self._tasks:
            self._tasks[name] = self.progress.add_task(name, total=total, detail="")
        shown = shortened(detail, self.console.width - BESIDE)
        self.progress.update(self._tasks[name], completed=done, total=total, detail=shown, waiting=False)

    def waiting(self, text: str) -> None:
        self.console.print(text, highlight=False)
        for task in self._tasks.values():
            self.progress.update(task, waiting=True)

    def log(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(text, highlight=False)

    def stage(self, name: str) -> Callable[[int, int], None]:
        """Return what shows how far a stage is: a bar, or a line of text every few seconds."""
        if self.console.is_terminal:
            return lambda done, total: self.show(name, done, total)
        began = logged = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal began, logged
            now = time.monotonic()
            if done <= 1:
                began = logged = now
            if now - logged >= BETWEEN_LOGS:
                logged = now
                self.log(f"{name.lower()} {done}/{total}, about {duration((now - began) / done * (total - done))} left")

        return report

    def rounds(
        self, total: int, records: Sequence[Measured], zero_shot_accuracy: float | None
    ) -> Callable[[Measured], None]:
        self.show("Rounds", len(records), total)
        if records:
            self.console.print(f"Continuing after round {len(records)} of {total}.")

        def update(record: Measured) -> None:
            figure = figure_of(record, zero_shot_accuracy)
            self.show("Rounds", record.round, total, figure)
            self.log(f"round {record.round}/{total}  {figure}")

        return update


class NotebookDisplay:
    """One line below the cell that is rewritten as work goes on, at most ten times a second."""

    def __init__(self) -> None:
        self._line: Any = None  # made when there is something to say: a run that is refused leaves no empty line
        self._text, self._shown, self._when = "", "", 0.0

    def __enter__(self) -> "NotebookDisplay":
        return self

    def __exit__(self, *exception: object) -> None:
        self._write()

    def show(self, name: str, done: int, total: int | None, detail: str = "") -> None:
        text = f"{name} {done}/{total}" if total is not None else name
        self._text = f"{text}  {detail}".rstrip()
        if time.monotonic() - self._when >= BETWEEN_LINES:
            self._write()

    def _write(self) -> None:
        from IPython.display import display

        if self._text == self._shown:
            return
        content = {"text/plain": self._text}
        if self._line is None:
            self._line = display(content, raw=True, display_id=True)
        else:
            self._line.update(content, raw=True)
        self._shown, self._when = self._text, time.monotonic()

    def log(self, text: str) -> None:
        """The line below the cell stays."""

    def stage(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: self.show(name, done, total)

    def waiting(self, text: str) -> None:
        self.show(text, 0, None)

    def rounds(
        self, total: int, records: Sequence[Measured], zero_shot_accuracy: float | None
    ) -> Callable[[Measured], None]:
        self.show("Rounds", len(records), total)
        return lambda record: self.show("Rounds", record.round, total, figure_of(record, zero_shot_accuracy))


class SilentLine(Silent):
    """A silent display that many runs can share."""

    def __enter__(self) -> "SilentLine":
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def show(self, *ignored: Any) -> None:
        return

    def log(self, text: str) -> None:
        return


def display_here(quiet: bool = False) -> TerminalDisplay | NotebookDisplay | SilentLine:
    """Return the display that fits where Python runs: a notebook, or a terminal."""
    if quiet:
        return SilentLine()
    return NotebookDisplay() if in_notebook() else TerminalDisplay()


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this; IPython in a terminal has a shell too, but no kernel."""
    ipython = sys.modules.get("IPython")  # whoever runs cells has imported it
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def when_slow(show: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Show how far a piece of work is once it has taken a while; most rounds are over before."""
    began = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal began
        if done <= 1:
            began = time.monotonic()
        if time.monotonic() - began >= A_WHILE:
            show(done, total)

    return report


def shortened(text: str, width: int) -> str:
    """Return a text in so many columns, without its middle if it is longer."""
    return text if len(text) <= width else f"{text[: max(0, width - TAIL_LENGTH - 1)]}…{text[-TAIL_LENGTH:]}"


def duration(seconds: float) -> str:
    """Return a time to wait in words."""
    whole = round(seconds)
    return (
        f"{whole} s"
        if whole < 60
        else f"{whole // 60} min {whole % 60} s"
        if whole < 3600
        else f"{whole // 3600} h {whole % 3600 // 60} min"
    )


def figure_of(record: Measured, zero_shot_accuracy: float | None) -> str:
    """Return a round's accuracy as text, with zero-shot beside it."""
    if record.validation is not None:
        return f"{record.validation:5.2f} % of the validation images"
    if record.accuracy is None:
        return ""
    return f"{record.accuracy:5.2f} %" + (
        f", zero-shot {zero_shot_accuracy:.2f} %" if zero_shot_accuracy is not None else ""
    )


class GridDisplay:
    """Progress over many runs: one bar or line, and a logged line for each finished run."""

    def __init__(self, display: LineDisplay) -> None:
        self.display = display
        self.title, self.done, self.total = "", 0, 0

    def begin(self, title: str, done: int, total: int) -> None:
        self.title, self.done, self.total = title, done, total
        self._detail("")

    def end(self, told: str, done: int, total: int) -> None:
        self.done = done
        self._detail(told)
        self.display.log(f"[{done}/{total}] {self.title}: {told}")

    def stage(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: self._detail(f"{name.lower()} {done}/{total}")

    def waiting(self, text: str) -> None:
        self._detail(text)

    def rounds(self, total: int, records: Sequence[Measured], *figures: Any) -> Callable[[Measured], None]:
        return lambda record: self._detail(f"round {record.round}/{total}")

    def _detail(self, text: str) -> None:
        self.display.show("Runs", self.done, self.total, f"{self.title}: {text}" if text else self.title)
