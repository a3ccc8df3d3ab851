"""The service over HTTP: sessions, images, limits, strangers, load and nonsense."""

import contextlib
import io
import json
import math
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
import torch
from helpers.finished import RUNS, asked_rows, client_of, png
from helpers.hostile import good
from helpers.runs import prepare
from PIL import Image

import fedvl.serve.worker
from fedvl.errors import FedVLError
from fedvl.evaluation.predict import Conversation
from fedvl.evaluation.statistics import wilson
from fedvl.runs.folder import RunFolder
from fedvl.serve.app import Offered, make_app
from fedvl.serve.guard import LIMITS
from fedvl.serve.images import example_file
from fedvl.serve.model import TrainedModel
from fedvl.serve.reported import ReportBox


@pytest.fixture(scope="module")
def client(address):
    with httpx.Client(base_url=address, timeout=120) as opened:
        yield opened


def begin(http, /, **asked):
    response = http.post("/sessions", json=asked)
    assert response.status_code == 201, response.text
    return response.json()


def send(client, session, files):
    """Results of one request; files are (name, content)."""
    response = client.post(f"/sessions/{session['id']}/images", files=[("files", file) for file in files])
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def images(count, start=0):
    return [(f"{row}.png", png(row * 7 % 500)) for row in range(start, start + count)]


class Gate(TrainedModel):
    """A run whose encoder waits to be let go on; beyond that the run itself."""

    def __init__(self, run):
        self.__dict__.update(vars(run))
        self.run, self.go, self.batches = run, threading.Semaphore(0), []

    def encode(self, pixels):
        self.batches.append(len(pixels))
        assert self.go.acquire(timeout=60)
        return self.run.encode(pixels)


def test_answers_equal_the_open_protocol_sample_by_sample(client, fed_mp):
    """Files of the run's own questions, in its order, get the answers and the scores that evaluation has."""
    rows = asked_rows(fed_mp.result)[:90]
    session = begin(client, top=4)
    told = send(client, session, [(f"{row}.png", png(row)) for row in rows])
    prepared = prepare(RUNS["fed-mp"])
    user = fed_mp.user()
    evaluation = Conversation(user.conversation.method, user.conversation.tensors)
    said = [
        evaluation.ask({form: tensor[first : first + 18] for form, tensor in prepared.test.samples.inputs.items()})
        for first in range(0, 90, 18)
    ]
    names = [user.names[c] for answer in said for c in answer.scores.argmax(-1).tolist()]
    assert [line["ranked"][0]["name"] for line in told] == names
    examples = [user.names[c] if c >= 0 else None for answer in said for c in answer.example_of.tolist()]
    assert [line["prototype_of"] for line in told] == examples
    shares = torch.cat([answer.scores.softmax(-1) for answer in said])
    for line, share in zip(told, shares, strict=True):
        found = {each["name"]: each["score"] for each in line["ranked"]}
        assert [found[name] for name in user.names] == pytest.approx(share.tolist(), abs=0.01)
        shown = [score for score in found.values() if score > 0]
        assert line["entropy"] == pytest.approx(-sum(score * math.log(score) for score in shown), abs=1e-4)


def test_a_session_from_beginning_to_end(client):
    session = begin(client, classes=["ship", "frog", "horse"])
    assert session["classes"] == ["ship", "frog", "horse"]
    assert sum(each["weight"] for each in session["client_weights"]) == pytest.approx(1)
    told = send(client, session, [*images(20), ("note.txt", b"not an image"), *images(1, 20)])
    assert [line["number"] for line in told] == list(range(22))
    assert [line["image"] for line in told][19:] == ["19.png", "note.txt", "20.png"]
    assert told[20]["refused"].startswith("it is not an image of a known format")
    for line in (*told[:20], told[21]):
        assert {each["name"] for each in line["ranked"]} == {"ship", "frog", "horse"}
        assert sum(each["score"] for each in line["ranked"]) == pytest.approx(1)
        scores = [each["score"] for each in line["ranked"]]
        assert scores == sorted(scores, reverse=True)
    shown = client.get(f"/sessions/{session['id']}").json()
    assert (shown["images"], shown["refused"]) == (22, 1)
    kept = {line["number"]: line["prototype_of"] for line in told if line.get("prototype_of")}
    assert kept
    assert {n: each["name"] for each in shown["prototypes"] for n in each["images"]} == kept
    assert send(client, session, images(1))[0]["number"] == 22
    assert client.delete(f"/sessions/{session['id']}").status_code == 204
    for response in (client.get(f"/sessions/{session['id']}"), client.delete(f"/sessions/{session['id']}")):
        assert response.status_code == 404
    assert client.post(f"/sessions/{session['id']}/images", files=[("files", good())]).status_code == 404


def test_health_metrics_and_description(client):
    send(client, begin(client, classes=["a", "b"]), [good(), ("x", b"")])
    assert client.get("/health").json()["status"] == "ok"
    counts = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    assert int(counts["fedvl_images_answered_total"]) >= 1
    assert int(counts["fedvl_images_refused_total"]) >= 1
    assert counts["fedvl_images_pending"] == "0"
    assert counts['fedvl_answer_seconds_bucket{le="+Inf"}'] == counts["fedvl_answer_seconds_count"]
    about = client.get("/run").json()
    assert (about["method"], about["new_classes"], about["limits"]["names"]) == ("fed-mp", True, 2_000)
    described = client.get("/openapi.json").json()["paths"]
    assert {"/sessions", "/sessions/{identifier}", "/sessions/{identifier}/images", "/health"} <= described.keys()
    assert client.get("/docs").status_code == 404  # it would load scripts from elsewhere


def test_the_page_is_told_what_the_test_measured_and_gets_card_preview_and_example(fed_mp):
    offered = Offered(unsure=0.9, example=("photo.png", png(3)))
    with client_of(make_app(fed_mp, offered=offered)) as client:
        about = client.get("/run").json()
        confusion, result = fed_mp.result.confusion, fed_mp.result
        assert about["accuracy"] == pytest.approx(result.accuracy)
        assert about["accuracy_interval"] == pytest.approx(list(wilson(result.accuracy, about["test_images"])))
        assert about["test_images"] == sum(map(sum, confusion))
        for number, tested in enumerate(about["tested"]):
            assert tested["name"] == result.class_names[number]
            assert tested["images"] == sum(confusion[number])
            assert tested["recognised"] == confusion[number][number]
            assert tested["named"] == sum(row[number] for row in confusion)
        assert (about["unsure"], about["example"], about["reports"]) == (0.9, "photo.png", False)
        assert client.get("/card").text.startswith("# Model card of fed-mp")
        assert f"{result.accuracy:.2f} %" in client.get("/card").text
        assert client.get("/example").content == png(3)
        assert client.post("/reports", data={"image": "a", "answer": "b", "share": 1}).status_code == 404

        wide = io.BytesIO()
        Image.new("RGB", (960, 480), (10, 200, 30)).save(wide, "TIFF")
        shown = client.post("/preview", files=[("files", ("scan.tif", wide.getvalue()))])
        small = Image.open(io.BytesIO(shown.content))
        assert (small.format, small.size, small.getpixel((5, 5))) == ("PNG", (480, 240), (10, 200, 30))
        assert "not an image" in client.post("/preview", files=[("files", ("x", b"x"))]).json()["detail"]
        assert client.post("/preview", data={"a": "b"}).status_code == 400

        told = send(client, begin(client, top=10), images(12))
        assert [line["unsure"] for line in told] == [line["ranked"][0]["score"] < 0.9 for line in told]
        assert {line["unsure"] for line in told} == {True, False}


def test_without_a_least_share_no_answer_is_marked_and_own_images_are_no_example(client, fed_mp, tmp_path):
    (told,) = send(client, begin(client), [good()])
    assert "unsure" not in told
    assert client.get("/example").status_code == 404
    found = example_file(fed_mp.folder, None)
    assert found
    name, content = found
    assert name == "example.webp"
    assert Image.open(io.BytesIO(content)).size == (32, 32)
    own = RunFolder(fed_mp.folder.path)
    own.result = fed_mp.result
    own.experiment = fed_mp.experiment.model_copy(
        update={"data": fed_mp.experiment.data.model_copy(update={"dataset": str(tmp_path)})}
    )
    assert example_file(own, None) is None
    (tmp_path / "photo.png").write_bytes(png(5))
    assert example_file(own, tmp_path / "photo.png") == ("photo.png", png(5))
    (tmp_path / "notes.txt").write_text("none")
    for wrong in (tmp_path / "notes.txt", tmp_path / "absent.png"):
        with pytest.raises(FedVLError, match=rf"{wrong.name} cannot be the example image"):
            example_file(own, wrong)


def test_reports_reach_the_operators_folder(fed_mp, tmp_path):
    limits = replace(LIMITS, file_bytes=30_000, text_bytes=2_000)
    with client_of(make_app(fed_mp, limits=limits, offered=Offered(reports=ReportBox(tmp_path)))) as client:
        told = {"image": "a.png", "answer": "cat", "share": "0.4", "truth": "dog"}
        assert client.get("/run").json()["reports"]
        files = [("picture", good())]
        assert client.post("/reports", data=told, files=[("nothing", ("", b""))]).status_code == 422
        assert client.post("/reports", data=told, files=files).status_code == 204
        (stored,) = (tmp_path / "pictures").iterdir()
        assert Image.open(stored).tobytes() == Image.open(io.BytesIO(good()[1])).convert("RGB").tobytes()
        for wrong in ({"share": "2"}, {"answer": "x" * 201}, {"picture": "x"}, {"other": "x"}):
            refused = client.post("/reports", data={**told, **wrong}, files=files)
            assert refused.status_code == 422
            assert refused.json()["detail"].startswith(next(iter(wrong)))
        assert client.post("/reports", data=told, files=[("picture", ("big", bytes(40_000)))]).status_code == 413
        assert len((tmp_path / "reported.csv").read_text().splitlines()) == 2


def test_results_stream_while_later_images_are_still_encoded(fed_mp, monkeypatch):
    monkeypatch.setattr(fedvl.serve.worker, "MAX_IMAGES_AT_ONCE", 18)
    monkeypatch.setattr(fedvl.serve.worker, "MAX_WAIT", 60)
    gate = Gate(fed_mp)
    with client_of(make_app(gate)) as client:
        session = begin(client, classes=["cat", "dog"])
        files = [("files", file) for file in images(30)]
        gate.go.release()
        with client.stream("POST", f"/sessions/{session['id']}/images", files=files) as response:
            lines = response.iter_lines()
            first = [json.loads(next(lines)) for _ in range(18)]
            gate.go.release()  # only now is the second batch encoded
            rest = [json.loads(line) for line in lines]
    assert [line["number"] for line in (*first, *rest)] == list(range(30))


def test_images_of_several_sessions_are_encoded_together_and_never_mixed(fed_mp):
    gate = Gate(fed_mp)
    questions = [["cat", "ship"], ["dog", "truck", "frog"], ["deer", "airplane"], ["bird", "horse"], ["jet", "boat"]]
    with client_of(make_app(gate)) as client, ThreadPoolExecutor(len(questions)) as pool:
        sessions = [begin(client, classes=names) for names in questions]
        alone = []
        for start, session in enumerate(sessions):
            gate.go.release()
            alone.append(send(client, session, images(6, 10 * start)))
        gate.batches.clear()
        again = [begin(client, classes=names) for names in questions]
        waiting = [pool.submit(send, client, session, images(6, 10 * n)) for n, session in enumerate(again)]
        gate.go.release(len(questions))
        together = [each.result() for each in waiting]
    assert max(gate.batches) > 6  # some requests shared a batch
    assert len(gate.batches) < len(questions)
    for names, one, other in zip(questions, alone, together, strict=True):
        assert {each["name"] for line in other for each in line["ranked"]} == set(names)
        assert [line["ranked"][0]["name"] for line in one] == [line["ranked"][0]["name"] for line in other]


def test_requests_of_one_session_take_turns(client):
    session = begin(client, classes=["cat", "dog"])
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda start: send(client, session, images(5, start)), range(0, 20, 5)))
    numbers = [[line["number"] for line in lines] for lines in told]
    assert sorted(numbers) == [list(range(first, first + 5)) for first in range(0, 20, 5)]


def test_a_client_that_leaves_does_not_block_its_session(fed_mp):
    gate = Gate(fed_mp)
    with client_of(make_app(gate)) as client:
        session = begin(client, classes=["cat", "dog"])
        with contextlib.suppress(httpx.ReadTimeout):
            client.post(f"/sessions/{session['id']}/images", files=[("files", good())], timeout=0.3)
        gate.go.release(5)
        assert len(send(client, session, images(3))) == 3


def test_a_full_service_says_when_to_come_back(fed_mp):
    gate = Gate(fed_mp)
    with client_of(make_app(gate, limits=replace(LIMITS, pending_images=8))) as client, ThreadPoolExecutor(1) as pool:
        one, other = begin(client, classes=["cat"]), begin(client, classes=["dog"])
        waiting = pool.submit(send, client, one, images(3))
        while not gate.batches:
            time.sleep(0.01)
        refused = client.post(f"/sessions/{other['id']}/images", files=[("files", file) for file in images(2)])
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert "busy" in refused.json()["detail"]
        gate.go.release(2)
        assert len(waiting.result()) == 3
        assert len(send(client, other, images(2))) == 2
        assert "fedvl_requests_refused_busy_total 1" in client.get("/metrics").text


def test_limits_of_requests_and_sessions(fed_mp):
    limits = replace(LIMITS, request_bytes=30_000, held_bytes=60_000, text_bytes=500, files=4, sessions=4, templates=2)
    with client_of(make_app(fed_mp, limits=limits)) as client:
        session = begin(client, classes=["cat", "dog"])
        path = f"/sessions/{session['id']}/images"
        assert client.post(path, files=[("files", ("big.png", bytes(40_000)))]).status_code == 413
        assert client.post(path, files=[("files", ("x", b"x"))] * 5).status_code == 400
        assert client.post("/sessions", content=b" " * 600).status_code == 413
        assert client.post("/sessions", content=iter([b"{}"])).status_code == 411
        assert client.post(path, content=b"x", headers={"content-type": "image/png"}).status_code == 400
        assert client.post(path, data={"files": "x"}).status_code == 400
        assert "at most" in client.post("/sessions", json={"classes": ["x" * 201]}).json()["detail"]
        assert client.post("/sessions", json={"templates": ["{}"] * 3}).status_code == 422
        assert client.post("/sessions", json={"top": 1000}).status_code == 422
        assert client.post("/sessions", json={"klasses": ["a"]}).json()["detail"].startswith("klasses:")
        begin(client)
        full = client.post("/sessions", json={})
        assert (full.status_code, full.headers["retry-after"]) == (503, "2")


def test_a_request_that_trickles_in_is_ended_and_frees_its_room(fed_mp):
    limits = replace(LIMITS, upload_seconds=1, held_bytes=200_000)
    with client_of(make_app(fed_mp, limits=limits)) as client:
        path = f"/sessions/{begin(client, classes=['cat'])['id']}/images"
        with socket.create_connection((client.base_url.host, client.base_url.port), timeout=30) as slow:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99000\r\n"
            slow.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n--x".encode())
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
        assert client.post(path, files=[("files", good())]).status_code == 200


def test_sessions_are_forgotten_when_idle_and_only_then(fed_mp):
    now = [0.0]
    with client_of(make_app(fed_mp, clock=lambda: now[0])) as client:
        used, idle = begin(client, classes=["cat"]), begin(client, classes=["dog"])
        now[0] = LIMITS.idle_seconds - 1
        send(client, used, [good()])
        now[0] += 2
        assert client.get(f"/sessions/{idle['id']}").status_code == 404
        assert client.get(f"/sessions/{used['id']}").status_code == 200
        assert "fedvl_sessions 1" in client.get("/metrics").text


def test_strangers_need_the_token(fed_mp):
    app = make_app(fed_mp, token="a secret of many letters")
    with client_of(app) as client:
        for path in ("/run", "/metrics", "/openapi.json", "/sessions/x"):
            assert client.get(path).status_code == 401
        assert client.post("/sessions", json={}).status_code == 401
        assert client.get("/run", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert (
            client.get("/run", headers={b"authorization": "Bearer a sécret of many letters".encode()}).status_code
            == 401
        )
        assert client.get("/").status_code == client.get("/health").status_code == 200
        known = {"authorization": "Bearer a secret of many letters"}
        assert client.get("/run", headers=known).status_code == 200
        assert client.get("/run", headers={**known, "host": "models.example"}).status_code == 200
        assert client.post("/sessions", json={}, headers={**known, "origin": "http://evil.example"}).status_code == 403


def test_without_a_token_other_sites_cannot_ask(client):
    """A page of another site, or one whose name was pointed at this machine (DNS rebinding)."""
    assert client.get("/run", headers={"host": "evil.example"}).status_code == 421
    assert client.get("/run", headers={"host": "["}).status_code == 421
    assert client.post("/sessions", json={}, headers={"origin": "http://evil.example"}).status_code == 403
    own = str(client.base_url).rstrip("/")
    assert client.post("/sessions", json={}, headers={"origin": own}).status_code == 201


def test_page_loads_nothing_from_elsewhere(client):
    page = client.get("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for path in ("/", "/page.css", "/page.js"):
        assert "//" not in client.get(path).text.replace("// ", "").replace("http://www.w3.org", "")


def test_nothing_is_written_to_disk(client, monkeypatch):
    """A file that Starlette would put aside on disk stays in memory."""
    content = io.BytesIO()
    Image.effect_noise((1200, 1200), 90).convert("RGB").save(content, "BMP")
    assert content.tell() > 4_000_000

    def refuse(*ignored, **also):
        raise AssertionError("a temporary file was made")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    (told,) = send(client, begin(client, classes=["cat", "ship"]), [("noise.bmp", content.getvalue())])
    assert "ranked" in told


def test_a_file_over_the_limit_is_refused_alone(fed_mp):
    with client_of(make_app(fed_mp, limits=replace(LIMITS, file_bytes=10_000))) as client:
        large, other = send(client, begin(client, classes=["cat"]), [("large.png", bytes(10_001)), good()])
    assert "more than" in large["refused"]
    assert "ranked" in other


def test_a_failing_encoder_fails_its_images_and_not_the_service(fed_mp, caplog):
    class Failing(Gate):
        def encode(self, pixels):
            if self.go.acquire(blocking=False):
                raise RuntimeError("out of memory")
            return self.run.encode(pixels)

    failing = Failing(fed_mp)
    with client_of(make_app(failing)) as client:
        session = begin(client, classes=["cat", "dog"])
        failing.go.release()
        assert "failed to encode" in send(client, session, [good()])[0]["refused"]
        assert "ranked" in send(client, session, [good()])[0]


def test_as_many_names_as_a_session_may_have_and_not_one_more(client):
    names = [f"thing {number}" for number in range(2_000)]
    session = begin(client, classes=names, top=100)
    assert len(session["classes"]) == 2_000
    (told,) = send(client, session, [good()])
    assert len(told["ranked"]) == 100
    refused = client.post("/sessions", json={"classes": [*names, "one more"]})
    assert (refused.status_code, "2,000 class names at most" in refused.text) == (422, True)


def test_names_of_a_personal_run(folder_of):
    with client_of(make_app(TrainedModel(RunFolder(folder_of("fedpp"))))) as client:
        assert client.get("/run").json()["personal"]
        shared, own = send(client, begin(client), [good()]), send(client, begin(client, client=1), [good()])
        assert shared[0]["ranked"] != own[0]["ranked"]
        assert "no private tensors of client 9" in client.post("/sessions", json={"client": 9}).json()["detail"]
        assert "knows only the classes" in client.post("/sessions", json={"classes": ["cat"]}).json()["detail"]
