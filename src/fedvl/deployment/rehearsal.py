"""The dry run of a client: what one round would send, and what attacks learn of it; no network."""

import secrets
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedvl.deployment.messages import Header, Message, MessageKind, pack_tensors, unpack_tensors
from fedvl.deployment.party import Party
from fedvl.errors import FedVLError
from fedvl.federation.local import LocalEngine
from fedvl.methods.base import Update
from fedvl.runs.experiment import local_engine
from fedvl.runs.preparation import Prepared
from fedvl.tensors import Tensors


def rehearse(prepared: Prepared, experiment: str, client: int) -> dict[str, Any]:
    """Return what a client would send in the first round, and what attacks learn of it."""
    from fedvl.audit import messages as audited  # a client at work does not wait for these
    from fedvl.audit.own_update import audit_own

    federation = prepared.experiment.federation
    engine = local_engine(in_the_open(prepared))
    handed, sent, last = answer_round(engine, experiment, client, prepared.experiment.seed)
    update = Update(client, sent.get("train", {}), last.weight)
    first = audited.Message(client, 0, handed, update, last.loss, sent.get("report", {}), last.examples)
    return {
        "method": prepared.experiment.method.label,
        "leaves": sent,
        "numbers": last.model_dump(include={"weight", "examples", "loss"}),
        "private": prepared.experiment.privacy.unit != "none",
        "least_clients": federation.least_clients if federation.secure_sum else None,
        "stays": engine.private.get(client, {}),
        "images": len(engine.rows[client]),
        "audit": audit_own(prepared, client, None if last.idle else first, secrets.randbits(62)),
    }


def in_the_open(prepared: Prepared) -> Prepared:
    """Return the experiment without secure aggregation, to show what a mask would hide."""
    experiment = prepared.experiment
    federation = experiment.federation.model_copy(update={"secure_sum": False})
    return replace(prepared, experiment=experiment.model_copy(update={"federation": federation}))


def answer_round(
    engine: LocalEngine, experiment: str, client: int, seed: int
) -> tuple[Tensors, dict[str, Tensors], Header]:
    """Answer the requests of a first round; return what was handed out and sent, by kind."""
    method = engine.method
    shared = method.first_shared(seed)
    handed = method.hand_out(shared, {}, client)
    sent: dict[str, Tensors] = {}
    consultation = method.consultation()
    kinds: list[MessageKind] = ["report", "adopt", "train"] if consultation and consultation.due(0) else ["train"]
    with TemporaryDirectory() as folder:
        party, state = Party(client, engine, Path(folder)), ""
        for kind in kinds:
            payload = handed if kind == "train" else shared
            if kind == "adopt" and consultation:
                report = None if consultation.summed else sent["report"]
                payload = consultation.settle(0, sent["report"], report)
            request = Header(run="0", experiment=experiment, round=0, attempt=0, kind=kind, client=client, state=state)
            header, content = party.answer(Message(request, pack_tensors(payload)))
            if header.problem:
                raise FedVLError(header.problem)
            state = header.state or state
            if content:
                sent[kind] = unpack_tensors(content, engine.federation.max_message_bytes)
    return handed, sent, header
