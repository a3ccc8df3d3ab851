"""A server that lies in secure sums, as a command: ``python -m helpers.lying_server LIE VICTIM VIEW server ...``.

It has every power of a server over real clients: it signs nothing, forges no key, and keeps all that it sees in the folder
VIEW. ``lists``: clients hear different lists of survivors in one reveal. ``models``: all but the victim get a model of
zeros. ``cheat``: the server is honest, and one client's share is changed on its way, as a lying client would send it.
"""

import sys
from pathlib import Path

import torch

from fedvl.deployment import remote, sum_server
from fedvl.deployment.messages import CONFIRM, pack_tensors, unpack_tensors
from fedvl.deployment.secure_sum import SHARES, SIGNATURES, SURVIVORS
from fedvl.tensors import save


class Lies:
    """What replaces the server's honest steps."""

    def __init__(self, lie: str, victim: int, view: Path) -> None:
        self.lie, self.victim, self.view, self.number = lie, victim, view, 0
        view.mkdir(parents=True, exist_ok=True)

    def keep(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        self.number += 1
        save(self.view / f"{self.number:04d}-{name}.safetensors", tensors)

    def exchange(self, honest, engine, kind, round_index, payloads, **options):
        if self.lie == "models" and kind == "train":
            payloads = {client: self.spoiled(client, payload) for client, payload in payloads.items()}
        if self.lie == "lists" and kind == CONFIRM["train"]:
            payloads = {client: pack_tensors({SURVIVORS: self.list_of(client, list(payloads))}) for client in payloads}
        answers = honest(engine, kind, round_index, payloads, **options)
        for client, answer in answers.items():
            self.keep(f"{kind}-{client}", answer.tensors)
        return answers

    def spoiled(self, client: int, payload: bytes) -> bytes:
        tensors = unpack_tensors(payload, 2**28)
        if client == self.victim:
            return payload
        return pack_tensors({k: t if k == "offers" else torch.zeros_like(t) for k, t in tensors.items()})

    def list_of(self, client: int, clients: list[int]) -> torch.Tensor:
        """The victim hears that a client was lost, two others that the victim was, the rest that nobody was."""
        others = [other for other in clients if other != self.victim]
        if client == self.victim:
            return torch.tensor(sorted([self.victim, *others[:-1]]))
        return torch.tensor(others if client in others[:2] else clients)

    def take_masked(self, honest, collected, answers, length):
        honest(collected, answers, length)
        if self.lie == "models":  # it takes them all the same
            collected.refusals.clear()
            collected.masked = {client: answer["masked"] for client, answer in sorted(answers.items())}
            collected.survivors = tuple(collected.masked)

    def take_signatures(self, honest, collected, answers):
        if self.lie == "cheat":
            honest(collected, answers)
            return
        self.signed = {client: answer[SIGNATURES][0].numpy().tobytes() for client, answer in answers.items()}
        collected.signatures = self.signed

    def reveal_requests(self, honest, collected):
        if self.lie != "lists":
            return honest(collected)
        requests, everybody = {}, list(collected.masked)
        for client in everybody:
            collected.survivors = tuple(self.list_of(client, everybody).tolist())
            requests[client] = honest(collected)[client]
        collected.survivors = tuple(everybody)
        return requests

    def open(self, honest, collected, reveals):
        if self.lie == "cheat" and self.victim in reveals:
            reveals[self.victim][SHARES][1, 0] ^= 1
        opened = honest(collected, reveals)
        self.keep("sum", {"total": opened.total})
        return opened


def replace(owner, name: str, lie) -> None:
    honest = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: lie(honest, *arguments, **options))


def main() -> None:
    lie, victim, view, *words = sys.argv[1:]
    lies = Lies(lie, int(victim), Path(view))
    replace(remote.RemoteEngine, "_exchange", lies.exchange)
    for name in ("take_masked", "take_signatures", "reveal_requests", "open"):
        replace(sum_server.Collected, name, getattr(lies, name))
    from fedvl.cli import main as command

    sys.argv = ["fedvl", *words]
    command()


if __name__ == "__main__":
    main()
