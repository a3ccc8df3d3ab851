"""Secure aggregation as the server runs it: attempts at a sum, lost clients, and spoiled sums."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from pydantic import ValidationError

from fedvl.config import FederationConfig
from fedvl.deployment.audit_log import AuditLog
from fedvl.deployment.files import Frozen
from fedvl.deployment.masking import shares_needed
from fedvl.deployment.messages import CONFIRM, REVEAL, SHARE, Header, MessageKind, SummedKind, pack_tensors
from fedvl.deployment.secure_sum import ROSTER, Entry, SumId, read_items
from fedvl.deployment.sum_server import Collected
from fedvl.errors import FedVLError
from fedvl.federation.checks import SpoiledSumError
from fedvl.files import read_file, write_whole
from fedvl.tensors import Tensors, count_bytes, load, save

MAX_NOTE_BYTES = 2**20


class Received(NamedTuple):
    header: Header
    tensors: Tensors


class Exchange(Protocol):
    """Send requests of one kind, and return the answers that came before the deadline."""

    def __call__(
        self, kind: MessageKind, round_index: int, payloads: Mapping[int, bytes], *, enough: int, sum_attempt: int
    ) -> dict[int, Received]: ...


class Search(Frozen):
    """A search by halves for the client that spoils sums.

    Whom to leave out next is chosen as if there were one culprit. A client is named only if it is
    the only one of a spoiled sum that was in no sound sum, which holds for any number of culprits.
    """

    suspects: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()  # of the next sum
    cleared: tuple[int, ...] = ()  # clients of sound sums since the search began
    spoiled: tuple[int, ...] = ()  # clients of the latest spoiled sum
    found: int | None = None

    def after(self, sound: bool, clients: Collection[int], room: int) -> "Search":
        """Return the search after a sum of these clients; ``room``: how many may be left out."""
        if not self.suspects and sound:
            return self
        cleared = {*self.cleared, *clients} if sound else set(self.cleared)
        spoiled = self.spoiled if sound else tuple(sorted(clients))
        possible = tuple(client for client in spoiled if client not in cleared)
        if not possible:  # somebody sends false numbers in some rounds only
            return Search() if sound else Search().after(False, clients, room)
        # in a spoiled sum, the culprit was one of its clients; in a sound sum, it was left out
        suspects = tuple(client for client in self.suspects if (client in clients) is not sound) or possible
        found = possible[0] if len(possible) == 1 else None
        left_out = suspects[: min((len(suspects) + 1) // 2, max(room, 0))]
        return Search(
            suspects=suspects, left_out=left_out, cleared=tuple(sorted(cleared)), spoiled=spoiled, found=found
        )


class Note(Frozen):
    """What a server that is started again must know of the sums of its run."""

    kind: str = ""
    round: int = -1
    attempt: int = 0  # the last one that was begun
    opening: bool = False  # whether clients may have opened shares: then no other attempt can be opened
    excluded: tuple[int, ...] = ()
    search: Search = Search()


class Sum(NamedTuple):
    """A sum in whole numbers, the state name of each client in it, and the bytes it took."""

    total: torch.Tensor
    states: dict[int, str]
    bytes_up: int


class SecureSums:
    """The secure sums of one run."""

    def __init__(
        self,
        exchange: Exchange,
        wait: Callable[[Sequence[int], int], set[int]],
        config: FederationConfig,
        run: str,
        experiment: str,
        certificates: Mapping[int, str],
        notes: Path | None,
        log: AuditLog,
        refuse: Callable[[int, str], None],
        name: Callable[[int], str],
    ) -> None:
        self.exchange, self.wait, self.config = exchange, wait, config
        self.run, self.experiment = run, experiment
        self.certificates, self.notes, self.log, self.refuse, self.name = certificates, notes, log, refuse, name
        self.entries: dict[int, Entry] = {}  # the clients' public keys
        self.note = self._read_note()
        self.void = 0  # rounds in a row whose sums could not be used
        self.begun: Collected | None = None  # whose shares clients may have opened, without a path for notes

    def least(self, clients: int) -> int:
        """Return the fewest clients of a sum over a roster of so many."""
        return max(self.config.least_clients, shares_needed(clients, self.config.sum_threshold))

    def sum(self, kind: SummedKind, round_index: int, cohort: Sequence[int], shared: Tensors, length: int) -> Sum:
        """Return the sum over a cohort; raise SpoiledSumError if it cannot be read."""
        collected, masked, sent = self._resumed(kind, round_index, shared, length)
        missing: list[int] = []
        for _ in range(self.config.attempts):
            if collected is not None:
                break
            collected, masked, sent, missing = self._collect(kind, round_index, cohort, shared, length)
        if collected is None:
            names = ", ".join(map(self.name, missing)) or "none of them answered"
            raise FedVLError(
                f"The secure sum of round {round_index + 1} needs {self.least(len(cohort))} clients or more "
                f"(federation.least_clients and federation.sum_threshold); missing: {names}. Committed rounds are safe; start "
                "the missing clients, then resume."
            )
        return self._open(collected, masked, sent)

    # --- an attempt

    def _collect(
        self, kind: SummedKind, round_index: int, cohort: Sequence[int], shared: Tensors, length: int
    ) -> tuple[Collected | None, dict[int, Received], int, list[int]]:
        """Try to get masked numbers and a signed survivor list; return who was missing."""
        wanted = [c for c in cohort if c not in self.note.excluded and c not in self.note.search.left_out]
        roster = self._roster(round_index, wanted)
        if len(roster) < self.config.least_clients:
            return None, {}, 0, [client for client in wanted if client not in roster]
        step = self._begin(kind, round_index)
        collected = Collected(self.run, step, list(roster.values()), self.config.sum_threshold)
        needed = self.least(len(roster))

        def ask(message: MessageKind, payload: bytes, clients: Sequence[int]) -> dict[int, Received]:
            return self.exchange(
                message, round_index, dict.fromkeys(clients, payload), enough=needed, sum_attempt=step.attempt
            )

        offers = ask(SHARE[kind], pack_tensors(collected.share_request()), list(roster))
        collected.take_offers(tensors_of(offers))
        masked, signed = dict[int, Received](), dict[int, Received]()
        if len(collected.offers) >= needed:
            masked = ask(kind, pack_tensors(collected.work_request(shared)), list(collected.offers))
            collected.take_masked(tensors_of(masked), length)
        if len(collected.survivors) >= needed:
            signed = ask(CONFIRM[kind], pack_tensors(collected.confirm_request()), collected.survivors)
            collected.take_signatures(tensors_of(signed))
        self._refuse_all(collected)
        sent = sum(count_bytes(answer.tensors) for part in (offers, masked, signed) for answer in part.values())
        if len(collected.signatures) >= collected.threshold:
            return collected, masked, sent, []
        return None, {}, 0, [client for client in wanted if client not in collected.signatures]

    def _roster(self, round_index: int, wanted: Sequence[int]) -> dict[int, Entry]:
        """Return the public keys of the connected clients; ask for those that are unknown."""
        there = self.wait(wanted, self.config.least_clients)
        unknown = [client for client in wanted if client in there and client not in self.entries]
        if unknown:
            payloads = dict.fromkeys(unknown, pack_tensors({}))
            answers = self.exchange("keys", round_index, payloads, enough=len(unknown), sum_attempt=0)
            for client, answer in answers.items():
                try:
                    (entry,) = read_items(answer.tensors.get(ROSTER), Entry)
                    if entry.client != client:
                        raise FedVLError("its key is in another client's name")
                    self.entries[client] = entry.model_copy(update={"certificate": self.certificates.get(client, "")})
                except (FedVLError, ValueError) as error:
                    self.refuse(client, str(error))
        return {client: self.entries[client] for client in wanted if client in self.entries and client in there}

    def _open(self, collected: Collected, masked: Mapping[int, Received], sent: int) -> Sum:
        """Collect shares until the sum opens; ask again for those that are missing."""
        step, reveals = collected.step, dict[int, Received]()
        self._opening(collected)
        requests = {client: pack_tensors(request) for client, request in collected.reveal_requests().items()}
        for _ in range(self.config.attempts):
            left = {client: request for client, request in requests.items() if client not in reveals}
            reveals |= self.exchange(
                REVEAL[step.kind], step.round, left, enough=collected.threshold - len(reveals), sum_attempt=step.attempt
            )
            if not collected.missing(reveals):
                break
        if missing := collected.missing(reveals):
            raise FedVLError(
                f"{len(reveals)} of {collected.threshold} necessary clients opened the sum of round {step.round + 1}; missing: "
                f"{', '.join(map(self.name, missing))}. Committed rounds are safe; start the missing clients, then resume."
            )
        try:
            opened = collected.open(tensors_of(reveals))
        except SpoiledSumError as error:
            raise self._spoiled(str(error), collected.survivors, error.culprits) from error
        finally:
            self._refuse_all(collected)
            for cheat in sorted(collected.cheats):
                self._exclude(cheat, "it opened a false share of another client's mask")
        sent += sum(count_bytes(answer.tensors) for answer in reveals.values())
        return Sum(opened.total, {client: masked[client].header.state for client in opened.clients}, sent)

    # --- spoiled sums

    def judge(self, clients: Sequence[int], problem: str | None) -> None:
        """Note whether a sum was sound; if not, search for the culprit and raise an error."""
        if problem:
            raise self._spoiled(problem, clients, ())
        self.void = 0
        self._search(True, clients)

    def _spoiled(self, problem: str, clients: Sequence[int], culprits: Sequence[int]) -> SpoiledSumError:
        for culprit in culprits:
            self._exclude(culprit, problem)
        suspects = len(self.note.search.suspects)
        if not culprits:
            self._search(False, clients)
        self.void += 1
        narrowed = culprits or len(self.note.search.suspects) < suspects
        if self.void >= self.config.attempts and not narrowed:
            raise FedVLError(
                f"The sums of {self.void} rounds in a row could not be used: {problem} If training diverged, lower the learning "
                "rate; otherwise several clients send false numbers: resume to search on, or revoke them and start a new run."
            )
        return SpoiledSumError(problem, culprits)

    def _search(self, sound: bool, clients: Sequence[int]) -> None:
        everybody = set(clients) | set(self.note.search.left_out)
        search = self.note.search.after(sound, clients, len(everybody) - self.least(len(everybody)))
        if search.found is not None:
            self._exclude(search.found, "sums with its numbers cannot be used, and sums without them can")
            search = Search()
        if search != self.note.search:
            self._write_note(self.note.model_copy(update={"search": search}))

    def _exclude(self, client: int, reason: str) -> None:
        if client not in self.note.excluded:
            self.refuse(client, f"{reason}; it is left out of the run's further sums")
            self._write_note(self.note.model_copy(update={"excluded": (*self.note.excluded, client)}))

    def _refuse_all(self, collected: Collected) -> None:
        for client, reason in collected.refusals:
            self.refuse(client, reason)
        collected.refusals.clear()

    # --- memory

    def _begin(self, kind: SummedKind, round_index: int) -> SumId:
        """Count an attempt before anything of it is sent."""
        same = (self.note.kind, self.note.round) == (kind, round_index)
        attempt = self.note.attempt + 1 if same else 1
        self._write_note(
            self.note.model_copy(update={"kind": kind, "round": round_index, "attempt": attempt, "opening": False})
        )
        return SumId(self.experiment, kind, round_index, attempt)

    def _opening(self, collected: Collected) -> None:
        """Write down what opens this sum, and log its survivor list, before any share is opened."""
        step = collected.step
        if self.notes is not None:
            save(self.notes.with_suffix(".safetensors"), collected.kept())
        self.begun = collected
        self._write_note(self.note.model_copy(update={"opening": True}))
        found = hashlib.sha256(collected.signed_part).hexdigest()
        self.log.append(
            "survivors", run=self.run, round=step.round + 1, message=step.kind, attempt=step.attempt, digest=found
        )

    def _resumed(
        self, kind: SummedKind, round_index: int, shared: Tensors, length: int
    ) -> tuple[Collected | None, dict[int, Received], int]:
        """Return the sum that was being opened when the server was killed, if any."""
        note = self.note
        if (note.kind, note.round, note.opening) != (kind, round_index, True):
            return None, {}, 0
        step = SumId(self.experiment, kind, round_index, note.attempt)
        if self.notes is not None:
            kept = load(self.notes.with_suffix(".safetensors"))
            collected = Collected.restored(self.run, step, self.config.sum_threshold, kept)
        else:
            assert self.begun is not None
            collected = self.begun
        survivors = collected.survivors
        payload = dict.fromkeys(survivors, pack_tensors(collected.work_request(shared)))
        masked = self.exchange(kind, round_index, payload, enough=len(survivors), sum_attempt=step.attempt)
        collected.take_masked(tensors_of(masked), length)
        self._refuse_all(collected)
        if missing := [client for client in survivors if client not in collected.masked]:
            raise FedVLError(
                f"The sum of round {round_index + 1} was begun with {', '.join(map(self.name, missing))}, missing now; start "
                "the missing clients, then resume."
            )
        return collected, masked, sum(count_bytes(answer.tensors) for answer in masked.values())

    def _read_note(self) -> Note:
        if self.notes is None or not self.notes.is_file():
            return Note()
        try:
            return Note.model_validate_json(read_file(self.notes, MAX_NOTE_BYTES))
        except ValidationError as error:
            raise FedVLError(f"{self.notes} is damaged; restore it from a copy, or start a new run.") from error

    def _write_note(self, note: Note) -> None:
        self.note = note
        if self.notes is not None:
            write_whole(self.notes, note.model_dump_json().encode())


def tensors_of(answers: Mapping[int, Received]) -> dict[int, Tensors]:
    return {client: answer.tensors for client, answer in answers.items()}
