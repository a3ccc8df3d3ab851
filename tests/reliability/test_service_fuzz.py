"""Whatever is sent, the service does not fail: requests made up from its own description (schemathesis)."""

import contextlib
from dataclasses import replace

import httpx
import pytest
from helpers.finished import serving
from helpers.lazy import lazily
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from fedvl.serve.app import make_app
from fedvl.serve.limits import LIMITS

schemathesis = lazily("schemathesis")

MODES = ["positive", "negative"]
SETTINGS = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def address(fed_mp):
    """With room for the many sessions that are begun and never ended here."""
    with serving(make_app(fed_mp, limits=replace(LIMITS, sessions=100_000, names_in_all=10**9))) as url:
        yield url


@pytest.mark.parametrize("mode", MODES)
def test_nothing_made_from_the_description_makes_it_fail(address, mode):
    """Every operation, with requests that fit its description and with ones that do not."""
    operations = [found.ok() for found in schemathesis.openapi.from_url(f"{address}/openapi.json").get_all_operations()]
    assert len(operations) == 7
    assert {each.value for each in schemathesis.GenerationMode} == set(MODES)
    seen: set[int] = set()
    for operation in operations:

        @SETTINGS
        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def check(case):
            response = case.call()
            seen.add(response.status_code)
            assert response.status_code < 500, f"{case.as_curl_command()}: {response.text}"

        with contextlib.suppress(Unsatisfiable):  # an operation without parameters has nothing to be wrong in
            check()
    assert seen & {200, 201, 422}


def test_images_of_a_real_session_in_odd_forms(address):
    """Schemathesis cannot know a session; forms that it would send are sent to a real one."""
    with httpx.Client(base_url=address, timeout=60) as client:
        path = f"/sessions/{client.post('/sessions', json={}).json()['id']}/images"
        form = "multipart/form-data; boundary=x"
        part = 'Content-Disposition: form-data; name="files"; filename='
        for kind, body in (
            ("multipart/form-data", b"--x--"),
            (form, b""),
            (form, b"--x--\r\n"),
            (form, b"--y\r\n\r\n--y--"),
            (form, b"--x\r\n\r\nno header\r\n--x--"),
            (form, f'--x\r\n{part}"a\r\n\r\n\r\n--x--'.encode()),
            (form, f'--x\r\n{part}"{"a" * 70_000}"\r\n\r\nx\r\n--x--'.encode()),
            (form, f'--x\r\n{part}"\xff\x00\ud7ff"\r\nContent-Type: \xff\r\n\r\nx\r\n--x--'.encode()),
            (form + "; charset=utf-99", f'--x\r\n{part}"é"\r\n\r\nx\r\n--x--'.encode()),
            (form, b"\x00" * 1000),
            ("multipart/form-data; boundary=" + "b" * 500, b"--b"),
            ("application/json", b'{"files": []}'),
        ):
            response = client.post(path, content=body, headers={"content-type": kind})
            assert response.status_code in (200, 400), (kind, body[:80], response.text)
        for body in (
            b'{"classes": ["\\ud800"]}',
            b'{"classes": [1e999]}',
            b"[" * 5000,
            b"\xff\xfe",
            b'{"client": 1e400}',
        ):
            response = client.post("/sessions", content=body, headers={"content-type": "application/json"})
            assert response.status_code in (400, 422), (body[:80], response.text)
