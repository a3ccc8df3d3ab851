"""Progress on standard error, so that standard output stays clean for tables and JSON."""

from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display(Protocol):
    """Where progress is shown."""

    def stage(self, name: str) -> Callable[[int, int], None]: ...

    def rounds(
        self, total: int, records: list[dict[str, Any]], zero_shot_accuracy: float | None
    ) -> Callable[[dict[str, Any]], None]: ...


class Silent:
    """A display that shows nothing."""

    def stage(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: None

    def rounds(self, *ignored: Any) -> Callable[[dict[str, Any]], None]:
        return lambda record: None


class TerminalDisplay:
    """A progress bar per stage, or plain lines without a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        self.progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal or quiet,
        )

    def __enter__(self) -> "TerminalDisplay":
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def stage(self, name: str) -> Callable[[int, int], None]:
        task = None

        def update(done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = self.progress.add_task(name, total=total, detail="")
            self.progress.update(task, completed=done, total=total)

        return update

    def rounds(
        self, total: int, records: list[dict[str, Any]], zero_shot_accuracy: float | None
    ) -> Callable[[dict[str, Any]], None]:
        task = self.progress.add_task("Rounds", total=total, completed=len(records), detail="")
        if records:
            self.console.print(f"Continuing after round {len(records)} of {total}.")

        def update(record: dict[str, Any]) -> None:
            accuracy = record.get("accuracy")
            figure = f"{accuracy:5.2f} %" if accuracy is not None else ""
            if figure and zero_shot_accuracy is not None:
                figure += f", zero-shot {zero_shot_accuracy:.2f} %"
            self.progress.update(task, advance=1, detail=figure)
            if not self.console.is_terminal:
                self.console.print(f"round {record['round']}/{total}  {figure}")

        return update


class GridDisplay:
    """Progress over many runs: one bar with the time left, or a line per run without a terminal."""

    def __init__(self, display: TerminalDisplay) -> None:
        self.display = display
        self.task = display.progress.add_task("Runs", total=None, detail="")
        self.title = ""

    def begin(self, title: str, done: int, total: int) -> None:
        self.title = title
        self.display.progress.update(self.task, completed=done, total=total, detail=title)

    def end(self, outcome: str, done: int, total: int) -> None:
        self.display.progress.update(self.task, completed=done, total=total, detail=f"{self.title}: {outcome}")
        if not self.display.console.is_terminal:
            self.display.console.print(f"[{done}/{total}] {self.title}: {outcome}", markup=False, highlight=False)

    def stage(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: self._detail(f"{name.lower()} {done}/{total}")

    def rounds(self, total: int, records: list[dict[str, Any]], *figures: Any) -> Callable[[dict[str, Any]], None]:
        return lambda record: self._detail(f"round {record['round']}/{total}")

    def _detail(self, text: str) -> None:
        self.display.progress.update(self.task, detail=f"{self.title}: {text}")
