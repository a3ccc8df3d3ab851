"""Answers that users report as wrong: rows of a file of the operator, and pictures if sent."""

import csv
import io
import os
import secrets
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from fedvl.display import csv_cell
from fedvl.errors import FedVLError
from fedvl.files import no_link

REPORTS_FILE = "reported.csv"
PICTURES = "pictures"
REPORT_COLUMNS = ("time", "image", "answer", "share", "truth", "remark", "picture")
MAX_ROWS_BYTES = 10_000_000
MAX_PICTURES_BYTES = 500_000_000


class ReportedAnswer(BaseModel):
    """An answer, and what it should have been, as its user says."""

    model_config = ConfigDict(extra="forbid")
    image: Annotated[str, Field(max_length=300)]
    answer: Annotated[str, Field(max_length=200)]
    share: Annotated[float, Field(ge=0, le=1)]
    truth: Annotated[str, Field(max_length=200)] = ""
    remark: Annotated[str, Field(max_length=1000)] = ""


class ReportBox:
    """A folder of the operator to which reports are appended, up to a size."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._lock, open(self._file, "a", encoding="utf-8") as file:
                if file.tell() == 0:
                    csv.writer(file).writerow(REPORT_COLUMNS)
        except OSError as error:
            raise FedVLError(
                f"Cannot write reports to {folder} ({error.strerror}); name another folder with --reports."
            ) from error

    @property
    def _file(self) -> Path:
        return no_link(self.folder / REPORTS_FILE)

    def add(self, reported: ReportedAnswer, picture: Image.Image | None) -> None:
        """Append a report; a picture is stored as PNG, without the headers of its file."""
        content = io.BytesIO()
        if picture is not None:
            picture.save(content, "PNG")
        row = io.StringIO()
        told = reported.model_dump()
        cells = [csv_cell(told[column]) for column in REPORT_COLUMNS[1:-1]]
        with self._lock:
            self._check_room(self._file.stat().st_size, MAX_ROWS_BYTES)
            name = self._store(content.getvalue()) if picture is not None else ""
            csv.writer(row).writerow([datetime.now(UTC).isoformat(timespec="seconds"), *cells, name])
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(row.getvalue())

    def _store(self, content: bytes) -> str:
        """Store a picture under a name that nobody chose, and return the name."""
        pictures = no_link(self.folder / PICTURES)
        pictures.mkdir(exist_ok=True)
        held = sum(entry.stat().st_size for entry in os.scandir(pictures))
        self._check_room(held + len(content), MAX_PICTURES_BYTES)
        name = f"{secrets.token_hex(8)}.png"
        (pictures / name).write_bytes(content)
        return f"{PICTURES}/{name}"

    def _check_room(self, size: int, most: int) -> None:
        if size > most:
            raise FedVLError("The operator's folder of reports is full; ask the operator to empty it.")
