"""Bytes from a stranger: either the very tensors that were sent, or FedVL's own error, whatever they are."""

import json
import random
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedvl.deployment.messages import FORMAT, MAX_HEADER_BYTES, Header, pack_tensors, read_header, unpack_tensors
from fedvl.errors import FedVLError

FROZEN = Path(__file__).with_name(f"messages_{FORMAT}.json")  # as this format is, for machines of other versions
TENSORS = {
    "weight": torch.arange(12.0).view(3, 4).T,  # not contiguous
    "bias": torch.tensor(2.5),
    "none": torch.zeros(0, 5),
    "counts": torch.arange(3),
    "double": torch.full((2,), torch.pi, dtype=torch.float64),
}
LIMIT = 10_000


def payload_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def described(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def attempt(payload, limit=LIMIT):
    """The tensors or the reason; anything else that is raised fails the test."""
    try:
        tensors = unpack_tensors(payload, limit)
    except FedVLError as error:
        return str(error)[:400]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) <= len(payload)
    return tensors


@pytest.mark.parametrize("tensors", [TENSORS, {}, {"ключ 🔑": torch.ones(1)}], ids=["several", "none", "any name"])
def test_what_is_sent_arrives(tensors):
    arrived = unpack_tensors(pack_tensors(tensors), LIMIT)
    assert arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)


def test_the_same_tensors_are_the_same_bytes_in_any_order():
    assert pack_tensors(TENSORS) == pack_tensors(dict(reversed(TENSORS.items())))


REFUSED = {
    "nothing": (b"", "only 0 bytes"),
    "seven bytes": (b"1234567", "only 7 bytes"),
    "more than allowed": (bytes(LIMIT + 1), "more than the 10,000"),
    "a header of 2**62 bytes": ((2**62).to_bytes(8, "little") + b"{}", "claims a header of 4,611,686,018,427,387,904"),
    "a header longer than the message": ((500).to_bytes(8, "little") + b"{}", "invalid header length"),
    "no JSON": (payload_of(b"tensors"), "invalid JSON"),
    "a list": (payload_of(b"[]"), "invalid JSON"),
    "nested without end": (payload_of(b'{"a":' * 1500), "invalid JSON"),
    "invalid UTF-8": (payload_of(b'{"\xff":1}'), "invalid UTF-8"),
    "half a message": (payload_of(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)), "JSON"),
    "3.6 TiB": (payload_of(described(shape=[10**12], offsets=[0, 4 * 10**12])), "not fully covered"),
    "a shape that lies": (payload_of(described(shape=[2]), bytes(4)), "invalid shape"),
    "a size that overflows": (payload_of(described(shape=[2**62, 2**62]), bytes(4)), "not whole"),
    "an empty size that overflows": (payload_of(described(shape=[0, 2**63], offsets=[0, 0])), "does not exist"),
    "a negative size": (payload_of(described(shape=[-1]), bytes(4)), "invalid JSON"),
    "strings": (payload_of(described("STR"), bytes(4)), "unknown variant"),
    "a type that torch lacks": (payload_of(described("F4", [8]), bytes(4)), "does not exist"),
    "offsets turned round": (payload_of(described(offsets=[4, 0]), bytes(4)), "not whole"),
    "data beyond the last tensor": (payload_of(described(), bytes(5)), "not fully covered"),
    "a hole": (payload_of(described(offsets=[4, 8]), bytes(8)), "not whole"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_a_reason(kind):
    payload, words = REFUSED[kind]
    reason = attempt(payload)
    assert isinstance(reason, str)
    assert words in reason
    assert len(reason) < 400


@settings(max_examples=1000, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_tensors_or_our_own_error(payload):
    attempt(payload)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
TYPES = ("F32", "F64", "F16", "BF16", "I64", "U8", "BOOL", "C64", "F4", "F6_E2M3", "F8_E8M0", "F8_E4M3", "U64", "STR")
SIZES = st.integers(-1, 6) | st.sampled_from([2**31, 2**62, 2**63 - 1, 2**63, 2**64])
DESCRIPTIONS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(TYPES),
        "shape": st.lists(SIZES, max_size=5),
        "data_offsets": st.lists(st.integers(0, 40) | SIZES, min_size=2, max_size=2),
    }
)


@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), DESCRIPTIONS | JSON, max_size=3),
    st.binary(max_size=40),
)
@example({"x": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, b"")
def test_any_header_is_tensors_or_our_own_error(header, data):
    attempt(payload_of(header, data))


def damaged(generator, payload):
    """One to four bytes changed, pieces cut out, put in or repeated."""
    for _ in range(generator.randint(1, 4)):
        place, length = generator.randrange(len(payload) + 1), generator.randint(1, 30)
        what = generator.choice(("change", "cut", "insert", "repeat"))
        middle = {"change": 1, "cut": length}.get(what, 0)
        new = (
            payload[place : place + length] if what == "repeat" else generator.randbytes(min(length, middle or length))
        )
        payload = payload[:place] + (b"" if what == "cut" else new) + payload[place + middle :]
    return payload


def test_ten_thousand_damaged_messages_are_tensors_or_our_own_error():
    """Without hypothesis, which would take a minute."""
    generator, whole = random.Random(0), pack_tensors(TENSORS)
    outcomes = Counter(type(attempt(damaged(generator, whole))) for _ in range(10_000))
    assert outcomes[str] > 5_000
    assert outcomes[dict] > 100  # damage to the data alone is for the checks, and for a hash where there is one


def test_a_header_full_of_empty_tensors_takes_bounded_memory():
    """Each costs the sender a line; a header of the largest size must not cost the server a hundred times that."""
    line = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({str(number): line for number in range(MAX_HEADER_BYTES // 70)}, separators=(",", ":")).encode()
    assert MAX_HEADER_BYTES // 2 < len(header) <= MAX_HEADER_BYTES
    tracemalloc.start()
    tensors = unpack_tensors(payload_of(header), 2 * MAX_HEADER_BYTES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(tensors) == MAX_HEADER_BYTES // 70
    assert peak < 32 * MAX_HEADER_BYTES
    reason = attempt(payload_of(header * 2), 4 * MAX_HEADER_BYTES)
    assert "claims a header" in reason


# --- the format that machines of several versions share


def frozen():
    """Two messages of this format, and every name in it, as they were when it was frozen."""
    header: dict[str, Any] = {
        "run": "a" * 32,
        "experiment": "b" * 64,
        "round": 3,
        "attempt": 17,
        "kind": "train",
        "client": 2,
    }
    request = Header(**header, state="c" * 64, log="d" * 64, sum_attempt=1)
    reply = request.model_copy(update={"examples": 600, "weight": 600.0, "loss": 1.25, "state": "e" * 64})
    payload = pack_tensors({"weight": torch.tensor([[1.5, -2.0]]), "counts": torch.arange(2)})
    return {
        "format": FORMAT,
        "request": request.model_dump_json(),
        "reply": reply.model_dump_json(),
        "payload": payload.hex(),
        "header": Header.model_json_schema()["properties"],
    }


def test_messages_have_the_bytes_of_their_format():
    """A machine with the version before or after writes and reads the same; else FORMAT tells both that they do not."""
    sentence = "The format of messages changed: raise FORMAT in messages.py, and write frozen() of this file into its new file."
    assert frozen() == json.loads(FROZEN.read_bytes()), sentence


def test_frozen_messages_are_read():
    written = json.loads(FROZEN.read_bytes())
    request, reply = read_header(written["request"]), read_header(written["reply"])
    assert reply.answers(request)
    assert (request.kind, request.round, reply.examples, reply.loss) == ("train", 3, 600, 1.25)
    tensors = unpack_tensors(bytes.fromhex(written["payload"]), LIMIT)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"weight": [[1.5, -2.0]], "counts": [0, 1]}


def test_a_message_may_be_as_long_as_the_limit_and_its_header_too():
    payload = pack_tensors(TENSORS)
    assert attempt(payload, len(payload)).keys() == TENSORS.keys()
    assert f"more than the {len(payload) - 1:,}" in attempt(payload, len(payload) - 1)
    assert "not whole" in attempt(MAX_HEADER_BYTES.to_bytes(8, "little") + b"{}")
    assert "claims a header" in attempt((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}")
    assert "not whole" in attempt(bytes(8)), "eight bytes are a length"
