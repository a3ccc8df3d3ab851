"""A client's side of a federation: train, keep private tensors in its own folder, and answer.

Private tensors are files named after their SHA-256, salted so that the server cannot try out
guesses. Every request names those to begin with, so nothing is lost or counted twice when either
side is killed; files that no request can name any more are removed.
"""

import hashlib
import secrets
from pathlib import Path

from fedvl.deployment.messages import Header, Message, decode, encode, write
from fedvl.errors import FedVLError
from fedvl.federation.local import LocalEngine
from fedvl.files import write_whole
from fedvl.tensors import Tensors, digest, load, save

ROUNDS_KEPT = 2  # behind the present one: as many as the server's journal may fall back


class Party:
    """One client in one run; its engine holds the data of this client alone."""

    def __init__(self, number: int, engine: LocalEngine, folder: Path) -> None:
        self.number, self.engine, self.folder = number, engine, folder
        self.device = engine.data.labels.device
        self.limit = engine.federation.max_message_bytes
        self.finished: Tensors | None = None  # the final shared tensors, once the run is over
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (folder / "salt").is_file():
            write_whole(folder / "salt", secrets.token_bytes(32))
        self.salt = (folder / "salt").read_bytes()

    def answer(self, message: Message) -> Message:
        """The answer to a request; what goes wrong here is told, and ends nothing."""
        header = message.read_header()
        try:
            return self._answer(header, message.payload)
        except FedVLError as error:
            return write(header.model_copy(update={"problem": str(error)[:500]}))

    def _answer(self, request: Header, payload: bytes) -> Message:
        if request.client != self.number:
            raise FedVLError(f"This is client {self.number}, and the request is for client {request.client}.")
        self._begin(request)
        received = {name: t.to(self.device) for name, t in decode(payload, self.limit).items()}
        if request.kind == "finish":
            self.finished = received
            return write(request)
        if request.kind == "adopt":
            self.engine.adopt({self.number: received})
            return write(request.model_copy(update={"state": self._keep(request.round)}))
        if request.kind == "report":
            reports, refusals = self.engine.report(request.round, received)
            if not reports:
                return write(
                    request.model_copy(update={"idle": not refusals, "problem": "".join(r.reason for r in refusals)})
                )
            return write(request.model_copy(update={"state": self._keep(request.round)}), encode(reports[0].tensors))
        trained = self.engine.train(request.round, [self.number], received)
        if not trained:
            return write(request.model_copy(update={"idle": True}))
        self.engine.keep(trained)
        result = trained[0]
        reply = {"state": self._keep(request.round), "weight": result.update.weight, "loss": result.loss}
        return write(request.model_copy(update=reply), encode(result.update.tensors))

    # --- private tensors

    def _begin(self, request: Header) -> None:
        """Load the private tensors that the request names; remove those too old to be named."""
        self.engine.private.pop(self.number, None)
        if request.state:
            path = self._find(request.state)
            tensors = load(path) if path else {}
            if self._name(tensors) != request.state:
                raise FedVLError(
                    "Its private tensors of an earlier round are lost or damaged; restore its folder, or start a new run."
                )
            self.engine.private[self.number] = {name: tensor.to(self.device) for name, tensor in tensors.items()}
            assert path is not None
            path.rename(self.folder / file_name(request.round, request.state))
        for path in self.folder.glob("[0-9]*-*.safetensors"):
            if int(path.name.split("-")[0]) < request.round - ROUNDS_KEPT:
                path.unlink()

    def _keep(self, round_index: int) -> str:
        """Write the present private tensors; their name."""
        private = self.engine.private.get(self.number, {})
        if not private:
            return ""
        name = self._name(private)
        save(self.folder / file_name(round_index, name), private)
        return name

    def _name(self, tensors: Tensors) -> str:
        return hashlib.sha256(self.salt + digest(tensors).encode()).hexdigest()

    def _find(self, name: str) -> Path | None:
        return max(self.folder.glob(f"*-{name}.safetensors"), default=None)


def file_name(round_index: int, name: str) -> str:
    return f"{round_index:06d}-{name}.safetensors"
