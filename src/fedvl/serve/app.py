"""The HTTP service: sessions of class names that classify images and stream ranked predictions."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from fedvl.config import BY_CLIENT
from fedvl.data.images import MAX_PIXELS, decode
from fedvl.errors import FedVLError
from fedvl.report.card import accuracy, card_text, lineage
from fedvl.serve.askers import Asker, BusyError, TurnPool
from fedvl.serve.guard import BUSY, LIMITS, Guard, Limits, address_of, check_token, refusal_response
from fedvl.serve.images import preview_of
from fedvl.serve.metrics import Metrics
from fedvl.serve.model import TrainedModel
from fedvl.serve.reported import ReportBox, ReportedAnswer
from fedvl.serve.sessions import Session, Sessions, Upload, answers, as_text
from fedvl.serve.worker import Worker
from fedvl.version import __version__

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what is wrong in a form is told to its sender
PAGE = Path(__file__).parent / "page"
PAGE_FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js", "/icon.svg": "icon.svg"}
UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"files": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                    "required": ["files"],
                }
            }
        },
    }
}
RESULTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One line of JSON per file, in order: number, image, and either ranked (name and score, "
        "most likely first), entropy, unsure (if a least share is set), prototype_of, zero_shot and, if the run has "
        "thresholds, above_threshold, or refused with the reason.",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    }
}


class Problem(BaseModel):
    detail: str


class NewSession(BaseModel):
    """All fields are optional; without class names, the run's own are used."""

    model_config = ConfigDict(extra="forbid")
    # The first error ends the check: a list of a million errors would take minutes and gigabytes.
    classes: list[str] | None = Field(
        None, fail_fast=True, description="Class names to choose from, in any language the model knows."
    )
    templates: list[str] | None = Field(None, fail_fast=True, description="Prompt templates with {} where a name goes.")
    client: int | None = Field(
        None, ge=0, le=10**9, description="Query this client's personal model, if the run has one."
    )
    top: int = Field(5, ge=1, description="Names returned per image.")

    @model_validator(mode="before")
    @classmethod
    def has_few_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > 2 * len(cls.model_fields):
            raise ValueError("it has too many fields")
        return given


class ClientWeight(BaseModel):
    client: int
    weight: float


class Prototypes(BaseModel):
    name: str
    images: list[int]


class SessionView(BaseModel):
    id: str
    classes: list[str]
    client_weights: list[ClientWeight]
    prototypes: list[Prototypes]
    images: int
    refused: int
    batch_size: int
    remembers: bool
    expires_in_seconds: float


class TestedClass(BaseModel):
    """Test images of a class, how many were recognised, and how many images got its name."""

    name: str
    images: int
    recognised: int
    named: int


class About(BaseModel):
    """What is served, and its limits."""

    method: str
    model: str
    dataset: str
    clients: int
    classes: list[str]
    new_classes: bool
    temperature: float | None
    temperature_from: str | None
    thresholds: dict[str, float] | None
    thresholds_chosen: str | None
    personal: bool
    accuracy: float | None
    accuracy_interval: list[float] | None
    test_images: int
    tested: list[TestedClass]
    unsure: float | None
    example: str | None
    reports: bool
    limits: dict[str, int | float]


class Offered(NamedTuple):
    """What the operator offers beside the model."""

    unsure: float | None = None  # share below which answers are "unsure"; the run's setting if absent
    example: tuple[str, bytes] | None = None  # name and content of an image
    reports: ReportBox | None = None


NOTHING_OFFERED = Offered()


class InMemory(MultiPartParser):
    """A form parser that keeps files in memory; the guard limits their size."""

    spool_max_size = LIMITS.request_bytes


def make_app(
    run: TrainedModel,
    token: str | None = None,
    limits: Limits = LIMITS,
    clock: Callable[[], float] = time.monotonic,
    offered: Offered = NOTHING_OFFERED,
) -> FastAPI:
    check_token(token)
    worker = Worker(run, limits.pending_images)
    sessions = Sessions(limits, clock)
    metrics = Metrics()
    naming = TurnPool(1, "fedvl-names")  # encodes class names while other sessions are served

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        naming.stop()
        worker.stop()

    # FastAPI's documentation pages load scripts from elsewhere, so only /openapi.json is served.
    app = FastAPI(title="FedVL", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    problems: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem} for status in (400, 401, 403, 404, 408, 411, 413, 421, 422, 503)
    }

    @app.exception_handler(RequestValidationError)
    async def explain(request: Request, error: RequestValidationError) -> JSONResponse:
        problem = error.errors()[0]
        location = ".".join(str(part) for part in problem["loc"] if part != "body")
        return refusal_response(
            422, f"{location or 'The request'}: {problem['msg']}.".encode(errors="replace").decode()
        )

    @app.exception_handler(FedVLError)
    async def say(request: Request, error: FedVLError) -> JSONResponse:
        return refusal_response(422, str(error))

    @app.exception_handler(BusyError)
    async def busy(request: Request, error: Exception) -> JSONResponse:
        metrics.busy += 1
        return refusal_response(503, BUSY, limits.retry_seconds)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return refusal_response(500, "The service failed; see its log.")

    def found(identifier: str) -> Session:
        session = sessions.find(identifier)
        if session is None:
            raise HTTPException(404, "There is no such session, or it has ended; create another.")
        return session

    def view(session: Session) -> SessionView:
        weights = session.user.client_weights
        return SessionView(
            id=session.id,
            classes=list(session.user.names),
            client_weights=[ClientWeight(client=client, weight=weight) for client, weight in weights.items()],
            prototypes=[Prototypes(name=name, images=images) for name, images in session.examples.items()],
            images=session.images,
            refused=session.refused,
            batch_size=session.batch_size,
            remembers=session.user.remembers,
            expires_in_seconds=limits.idle_seconds,
        )

    @app.post("/sessions", status_code=201, responses=problems)
    async def begin(new: NewSession, request: Request) -> SessionView:
        """Create a session with a model for these class names."""
        check_limits(new, run, limits)
        address = address_of(request.scope)
        with sessions.room(address, len(new.classes or run.class_names)):
            made = naming.submit(
                Asker(address), partial(run.user, new.classes, new.templates, new.client, offered.unsure)
            )
            user = await asyncio.wrap_future(made)
            return view(sessions.begin(user, address, new.top, run.batch_size(user)))

    @app.get("/sessions/{identifier}", responses=problems)
    async def show(identifier: str) -> SessionView:
        """Return a session's client weights and prototypes, the latter as numbers of images."""
        return view(found(identifier))

    @app.delete("/sessions/{identifier}", status_code=204, responses=problems)
    async def end(identifier: str) -> None:
        """Delete a session."""
        if not sessions.end(identifier):
            raise HTTPException(404, "There is no such session, or it has already ended.")

    @app.post(
        "/sessions/{identifier}/images",
        openapi_extra=UPLOAD,
        responses={**problems, **RESULTS},
        response_class=StreamingResponse,
    )
    async def images(identifier: str, request: Request) -> StreamingResponse:
        """Classify images: any number of files in one form; results are streamed line by line."""
        session = found(identifier)
        files = await read_files(request, limits)
        fit = [data for _, data in files if len(data) <= limits.file_bytes]
        encodings = iter(worker.encode(fit, session.asker))
        uploads = [
            Upload(name, next(encodings))
            if len(data) <= limits.file_bytes
            else Upload(name, None, f"it has more than {limits.file_bytes // 1_000_000} MB.")
            for name, data in files
        ]

        async def lines() -> AsyncIterator[bytes]:
            began = time.monotonic()
            async for batch in answers(session, uploads, worker):
                sessions.touch(session)
                metrics.count(batch, time.monotonic() - began)
                yield as_text(batch)

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @app.post("/preview", openapi_extra=UPLOAD, responses=problems, response_class=Response)
    async def preview(request: Request) -> Response:
        """Return a small PNG of an image that browsers do not show, such as TIFF or DICOM."""
        ((_, data), *_) = await read_files(request, limits)
        asker = Asker(address_of(request.scope), "preview")
        shown = await asyncio.wrap_future(worker.read(asker, partial(preview_of, data)))
        return Response(shown, media_type="image/png")

    @app.post("/reports", status_code=204, responses=problems)
    async def report(request: Request) -> None:
        """Report a wrong answer to the operator: a form of its fields, and perhaps a picture."""
        if offered.reports is None:
            raise HTTPException(404, "This service takes no reports.")
        form = await read_form(request, limits)
        fields = {name: value for name, value in form if not isinstance(value, UploadFile)}
        try:
            told = ReportedAnswer.model_validate(fields)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "The report"
            raise HTTPException(422, f"{where}: {problem['msg']}.") from error
        pictures = [await take(value) for _, value in form if isinstance(value, UploadFile)]
        box, asker = offered.reports, Asker(address_of(request.scope), "reports")
        await asyncio.wrap_future(
            worker.read(asker, lambda: box.add(told, decode(pictures[0], told.image) if pictures else None))
        )

    @app.get("/card", response_class=PlainTextResponse, responses=problems)
    def card() -> str:
        """Return the model card in Markdown."""
        folder, result = run.folder, run.result
        tested = None if result.protocol in BY_CLIENT else accuracy(result)
        return card_text(folder.path.resolve().name, lineage(folder, run.class_names, None, {}, tested))

    @app.get("/example", responses=problems, response_class=Response)
    async def example() -> Response:
        """Return the image that the operator offers as an example."""
        if offered.example is None:
            raise HTTPException(404, "This service has no example image.")
        return Response(offered.example[1], media_type="application/octet-stream")

    @app.get("/run", responses=problems)
    async def about() -> About:
        """Return what is served, and its limits."""
        measured = None if run.result.protocol in BY_CLIENT else accuracy(run.result)
        return About(
            method=run.name,
            model=run.encoder.name,
            dataset=run.experiment.data.dataset,
            clients=run.experiment.data.clients,
            classes=run.class_names,
            new_classes=run.answers_new_classes,
            temperature=run.temperature,
            temperature_from=run.result.temperature_from,
            thresholds=run.thresholds.shares if run.thresholds else None,
            thresholds_chosen=run.thresholds.chosen if run.thresholds else None,
            personal=run.experiment.evaluation.protocol == "personal",
            accuracy=measured.percent if measured else None,
            accuracy_interval=measured.interval if measured else None,
            test_images=measured.images if measured else 0,
            tested=tested_classes(run) if measured else [],
            unsure=run.experiment.evaluation.unsure if offered.unsure is None else offered.unsure,
            example=offered.example[0] if offered.example else None,
            reports=offered.reports is not None,
            limits={**vars(limits), "pixels": MAX_PIXELS},
        )

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def measured() -> str:
        return metrics.text(len(sessions), worker)

    for path, file in PAGE_FILES.items():
        app.add_api_route(path, page_file(file), include_in_schema=False)
    app.add_middleware(Guard, token=token, limits=limits)
    app.state.limits, app.state.token = limits, token
    return app


def page_file(name: str) -> Callable[[], FileResponse]:
    return lambda: FileResponse(PAGE / name)


def tested_classes(run: TrainedModel) -> list[TestedClass]:
    """Return what the run's test says of each class."""
    confusion = run.result.confusion
    named = [sum(column) for column in zip(*confusion, strict=True)]
    return [
        TestedClass(name=name, images=sum(row), recognised=row[number], named=named[number])
        for number, (name, row) in enumerate(zip(run.class_names, confusion, strict=True))
    ]


def check_limits(new: NewSession, run: TrainedModel, limits: Limits) -> None:
    names, templates = new.classes or [], new.templates or []
    if len(names) > limits.names:
        raise FedVLError(f"A session has {limits.names:,} class names at most, not {len(names):,}.")
    if len(templates) > limits.templates:
        raise FedVLError(f"A session has {limits.templates} templates at most, not {len(templates)}.")
    own = not names and not templates
    if not own and len(names or run.class_names) * len(templates or run.templates) > limits.texts:
        raise FedVLError(f"Names times templates make {limits.texts:,} texts at most; give fewer names or templates.")
    if any(len(text) > limits.name_characters for text in (*names, *templates)):
        raise FedVLError(f"A class name or template has {limits.name_characters} characters at most.")
    if new.top > limits.top:
        raise FedVLError(f"At most {limits.top} names are returned per image; lower top.")


async def read_form(request: Request, limits: Limits) -> list[tuple[str, UploadFile | str]]:
    """Return the fields and files of a form."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise HTTPException(400, "Send images as files of a form (multipart/form-data).")
    try:
        parser = InMemory(request.headers, request.stream(), max_files=limits.files, max_fields=limits.files)
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise HTTPException(400, f"The form cannot be read ({str(error).rstrip('.')[:200]}).") from error
    return form.multi_items()


async def read_files(request: Request, limits: Limits) -> list[tuple[str, bytes]]:
    """Return the names and contents of the files in a form."""
    files = [value for _, value in await read_form(request, limits) if isinstance(value, UploadFile)]
    if not files:
        raise HTTPException(400, "The form holds no file; attach at least one image.")
    return [(file.filename or "", await take(file)) for file in files]


async def take(file: UploadFile) -> bytes:
    """Return a file's content, and free the form's copy of it."""
    content = await file.read()
    await file.close()
    return content
