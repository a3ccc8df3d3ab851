"""Checks of a method: the properties that the engine relies on, tried on the embedded data.

Three clients of different sizes train for two rounds, with one local epoch. One has fewer samples
than a batch, the others have more, so that padding occurs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from fedvl.config import Settings
from fedvl.data.sources import OPEN_ANEW, Opener
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.journal import Journal
from fedvl.federation.local import LocalEngine
from fedvl.federation.records import Record
from fedvl.federation.round import Federation
from fedvl.federation.statistics import statistics_over
from fedvl.methods.base import Batch, Method, Samples
from fedvl.methods.mistakes import check_names, explained
from fedvl.runs.diagnosis import untrained_faults
from fedvl.runs.experiment import local_engine, make_federation
from fedvl.runs.preparation import Prepared, prepare
from fedvl.runs.requirements import check_secure_sum
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors, on_threads

SMALL: Settings = {
    "data": {"clients": 3, "shots": 2, "test_shots": 1, "partition": "dirichlet:1", "minimum": 0},
    "federation": {"rounds": 2},
    "training": {"local_epochs": 1, "batch_size": 6},
    "device": "cpu",
}
HOOKS_OF_ONE = ("start", "join", "statistics", "solve", "merge", "step", "hand_out")  # never called on many clients
ROUNDING = 0.01  # of a tensor's move: the most by which two orders of the same sums may differ
RESOLUTION = 1e-6  # the same, of a tensor's norm, for what hardly moves
NEGLIGIBLE = 1e-4  # the same, of the largest move of any tensor: some gradients are 0 but for rounding
EXACT = 1e-9  # relative: sums in float64
TRAINS_NOTHING = "The method trains nothing."


class Check(BaseModel):
    """The outcome of one check."""

    name: str
    outcome: Literal["pass", "fail", "not applicable"]
    detail: str  # what was seen, and after a failure what to do


class MethodChecks(BaseModel):
    """The outcomes of all checks of one method."""

    method: str
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.outcome != "fail" for check in self.checks)


class NotApplicableError(FedVLError):
    """A check says nothing about this method."""


@dataclass
class Trial:
    """A method on the small federation, and the run that others are compared with."""

    name: str
    prepared: Prepared
    faults: list[str] = field(default_factory=list)  # of hooks that were called twice during the run
    finished: Federation | None = None

    def method(self) -> Method:
        """Return a new object of the method, which remembers nothing of other runs."""
        return type(self.prepared.method)(self.prepared.method.options, self.prepared.method.task)

    def federation(
        self, method: Method | None = None, journal: Journal | None = None, pooled: bool = False, **settings: Any
    ) -> Federation:
        """Return a federation before its first round; ``pooled``: one client has all samples."""
        experiment, training = self.prepared.experiment, self.prepared.training
        federation = experiment.federation.model_copy(update=settings)
        prepared = replace(
            self.prepared,
            method=method or self.method(),
            experiment=experiment.model_copy(update={"federation": federation}),
            training=replace(training, rows=[torch.cat(training.rows).sort().values]) if pooled else training,
        )
        return make_federation(prepared, local_engine(prepared), journal)

    def run(self, **settings: Any) -> Federation:
        return finished_federation(self.federation(**settings))

    def begun(self) -> Federation:
        """Return the run at its end, with all tensors that there are; at its start if it fails."""
        return self.finished or self.federation()

    @property
    def plain(self) -> Federation:
        """The run that others are compared with."""
        if self.finished is None:
            trains = self.federation().trains
            raise NotApplicableError("The method does not run; repair that first." if trains else TRAINS_NOTHING)
        return self.finished


def examine_method(name: str, opener: Opener = OPEN_ANEW) -> MethodChecks:
    """Check a method of the package or of the user's file."""
    experiment = resolve_experiment({"method": {"name": name}, **SMALL})
    with on_threads(experiment.federation.threads):
        with explained(name):
            trial = Trial(name, prepare(experiment, Silent(), opener))
        return MethodChecks(method=name, checks=[perform_check(title, check, trial) for title, check in CHECKS.items()])


def perform_check(title: str, check: "Callable[[Trial], str]", trial: Trial) -> Check:
    """Return the outcome of one check; whatever the method raises is a failure."""
    try:
        with explained(trial.name) as tried:
            tried.method, tried.samples = trial.prepared.method, trial.prepared.training.samples
            return Check(name=title, outcome="pass", detail=check(trial))
    except NotApplicableError as reason:
        return Check(name=title, outcome="not applicable", detail=str(reason))
    except FedVLError as error:
        return Check(name=title, outcome="fail", detail=str(error))
    except Exception as error:
        return Check(name=title, outcome="fail", detail=f"{type(error).__name__}: {error}")


# --- the checks


def runs(trial: Trial) -> str:
    """Two rounds; hooks that are called for one client at a time are called twice."""
    method = trial.method()
    for hook in HOOKS_OF_ONE:
        setattr(method, hook, called_twice(hook, getattr(method, hook), trial.faults))
    federation = trial.federation(method)
    if not federation.trains:
        raise NotApplicableError(TRAINS_NOTHING)
    trial.finished = finished_federation(federation)
    refused = [refusal for record in federation.records for refusal in record.refused]
    if refused:
        raise FedVLError(f"An update of client {refused[0].client} is refused: {refused[0].reason}.")
    return f"{len(federation.records)} rounds of {federation.engine.clients} clients."


def roles_are_consistent(trial: Trial) -> str:
    """Roles name tensors that exist, and say of them what training does with them."""
    federation = trial.begun()
    method, engine = federation.method, local_engine_of(federation)
    check_names(trial.name, method, engine.data)
    client = engine.rows.counts.index(max(engine.rows.counts))
    handed = method.hand_out(federation.shared, federation.last, client)
    private = engine.begun(client, handed)
    tensors: Tensors = {**handed, **private}
    joined = method.first_private(engine.data.take(engine.rows[client]), torch_generator(0, "join"))
    trained = [*method.role.trained(federation.shared), *(n for n in method.role.trained_private if n in private)]
    problems = [
        *(f"{name!r} is shared and private; use two names" for name in sorted(federation.shared.keys() & private)),
        *(
            f"{name!r} is {tensors[name].dtype}, which gradients cannot train; use trained=False in its role"
            for name in trained
            if not tensors[name].is_floating_point()
        ),
        *(
            f"{name!r} has {len(joined[name])} rows for {engine.rows.counts[client]} samples; remove per_sample"
            for name in sorted(method.role.per_sample & joined.keys())
            if len(joined[name]) != engine.rows.counts[client]
        ),
    ]
    if type(method).merge is not Method.merge and type(method).roles is Method.roles:
        problems.append('merge is never called without a tensor of the role Shared(needs="each"); give one in roles')
    if not problems and trained and (step := first_step(federation, client)):
        problems = training_against_roles(method, trained, *step) or untrained_faults(method, handed, *step)
    if problems:
        raise FedVLError("; ".join(problems) + ".")
    return f"{len(federation.shared)} shared, {len(private)} private and {len(federation.server)} server tensors."


def training_against_roles(method: Method, trained: Sequence[str], tensors: Tensors, batch: Batch) -> list[str]:
    """Return which tensors a step changes, or leaves, other than their roles say."""
    leaves = {name: tensors[name].detach().requires_grad_() for name in trained}
    loss, changed = method.objective({**tensors, **leaves}, batch)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    unused = [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is None]
    return [
        *(f"the loss does not depend on {name!r}; use trained=False in its role, or Server()" for name in unused),
        *(f"objective changes {name!r}, and so do gradients; use trained=False" for name in changed if name in leaves),
        *(f"objective changes {name!r}, which no client has; return it in join" for name in changed.keys() - tensors),
    ]


def values_are_finite(trial: Trial) -> str:
    """No hook returns NaN or infinity, for any client."""
    federation = trial.begun()
    method, engine, seen = federation.method, local_engine_of(federation), 0
    check_finite("start", method.start(torch_generator(0, "start")))
    for client, samples in each_client(engine):
        handed = method.hand_out(federation.shared, federation.last, client)
        if method.role.statistics:
            check_finite("statistics", method.statistics(federation.shared, samples), client)
        if step := first_step(federation, client):
            tensors, batch = step
            leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
            loss, changed = method.objective(leaves, batch)
            check_finite("loss", {"its value": loss.detach(), **changed}, client)
            moving = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
            gradients = torch.autograd.grad(loss, list(moving.values()), materialize_grads=True, allow_unused=True)
            check_finite("the gradient of loss", dict(zip(moving, gradients, strict=True)), client)
        with torch.no_grad():
            scores = method.predict({**handed, **engine.begun(client, handed)}, samples.inputs)
        check_finite("predict", {"scores": scores}, client)
        seen += 1
    check_finite("a run of two rounds", state_of(federation))
    return f"Hooks of {seen} clients, and what the run ends with."


def hooks_are_pure(trial: Trial) -> str:
    """The same input gives the same output, and no hook modifies its input."""
    federation = trial.begun()
    method, engine, faults = federation.method, local_engine_of(federation), list(trial.faults)
    predict, objective = (called_twice(name, getattr(method, name), faults) for name in ("predict", "objective"))
    client, samples = next(each_client(engine))
    handed = method.hand_out(federation.shared, federation.last, client)
    with torch.no_grad():
        predict({**handed, **engine.begun(client, handed)}, samples.inputs)
        if step := first_step(federation, client):
            objective(*step)
    if faults:
        raise FedVLError("; ".join(dict.fromkeys(faults)) + ".")
    return "Hooks called twice give the same, and leave their inputs as they are."


def batched_equals_one_by_one(trial: Trial) -> str:
    """Training all clients in one kernel changes nothing but rounding."""
    plain = trial.plain
    if plain.method.role.statistics:
        raise NotApplicableError("The method has no training steps.")
    name, share = farthest(trial, trial.run(one_by_one=True))
    if share > 1:
        raise FedVLError(
            f"{name!r} differs by {share:.2g} times what rounding explains. Clients have different numbers of samples, and "
            "rows beyond a client's own are padding: leave rows with batch.mask 0 out of every sum and mean."
        )
    return f"The largest difference is {share:.1g} of what is allowed for rounding."


def resumed_equals_uninterrupted(trial: Trial) -> str:
    """A run that ends after a round and goes on in another process has the same bits."""
    expected = state_of(trial.plain)
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal")
        with suppress(Interrupted):
            finished_federation(trial.federation(journal=journal), after_round=interrupt)
        again = trial.federation(journal=journal)
        again.restore()
        found = state_of(finished_federation(again))
    different = [name for name in expected if name not in found or not same(expected[name], found[name])]
    if different or found.keys() != expected.keys():
        names = different or sorted(found.keys() ^ expected.keys())
        raise FedVLError(
            f"{names[0]!r} has other bits after a resumed run. Keep nothing in attributes of the method: give what a round "
            "leaves to the next the role Private() at a client, or Server() at the server."
        )
    return "The same bits in all tensors."


def secure_sum_equals_mean(trial: Trial) -> str:
    """A run with secure aggregation gives the plain mean, or is refused."""
    plain, experiment = trial.plain, trial.prepared.experiment
    federation = experiment.federation.model_copy(update={"secure_sum": True})
    try:
        check_secure_sum(trial.method(), experiment.model_copy(update={"federation": federation}))
    except FedVLError as reason:
        raise NotApplicableError(f"Refused: {reason}") from reason
    name, share = farthest(trial, trial.run(secure_sum=True))
    if share > 1:
        raise FedVLError(
            f"{name!r} differs from the plain mean by {share:.2g} times what rounding explains. Secure aggregation adds whole "
            "numbers of a fixed resolution: scale the tensor so that its moves are larger than 1e-6."
        )
    at = "statistics" if plain.method.role.statistics else "updates"
    return f"Sums of {at} differ by {share:.1g} of what is allowed for rounding."


def statistics_are_sums(trial: Trial) -> str:
    """Statistics of two sets of samples add up to those of both; clients count as one."""
    method = trial.method()
    if not method.role.statistics:
        raise NotApplicableError("The method declares no statistics.")
    engine, shared = local_engine_of(trial.plain), trial.federation().shared
    rows = torch.cat(list(engine.rows))
    whole, first, second = (
        statistics_over(method, engine.data, part, shared) for part in (rows, *rows.tensor_split([len(rows) // 3]))
    )
    for name, total in whole.items():
        if float((first[name] + second[name] - total).norm()) > EXACT * float(total.norm()):
            raise FedVLError(
                f"{name!r} of two sets of samples is not the sum of theirs; return sums over samples from statistics, and "
                "divide in solve."
            )
    pooled = state_of(trial.run(pooled=True, quorum=1))
    for name, tensor in state_of(trial.run(one_by_one=True)).items():
        if float((tensor - pooled[name]).norm()) > ROUNDING * EXACT**0.5 * max(float(pooled[name].norm()), 1.0):
            raise FedVLError(f"{name!r} depends on which client holds which sample; use nothing but the sums in solve.")
    return "Statistics are additive, and clients together give what pooled samples give."


CHECKS: dict[str, Callable[[Trial], str]] = {
    "runs": runs,
    "roles": roles_are_consistent,
    "finite values": values_are_finite,
    "purity": hooks_are_pure,
    "batched = one by one": batched_equals_one_by_one,
    "resume": resumed_equals_uninterrupted,
    "secure aggregation": secure_sum_equals_mean,
    "statistics": statistics_are_sums,
}


# --- what they share


class Interrupted(Exception):  # noqa: N818 - it is no error
    """The run ends after a committed round."""


def interrupt(record: object) -> None:
    raise Interrupted


def finished_federation(
    federation: Federation, after_round: Callable[[Record], None] = lambda record: None
) -> Federation:
    federation.run(after_round=after_round)
    return federation


def local_engine_of(federation: Federation) -> LocalEngine:
    assert isinstance(federation.engine, LocalEngine)
    return federation.engine


def each_client(engine: LocalEngine) -> Iterator[tuple[int, Samples]]:
    return ((client, engine.data.take(rows)) for client, rows in enumerate(engine.rows) if len(rows))


def first_step(federation: Federation, client: int) -> tuple[Tensors, Batch] | None:
    """Return what the client's first step is given; None if it takes none."""
    if not federation.trains or federation.method.role.statistics:
        return None
    handed = federation.method.hand_out(federation.shared, federation.last, client)
    return local_engine_of(federation).first_step(client, handed)


def state_of(federation: Federation) -> Tensors:
    """Name all tensors that a run ends with."""
    found = {f"shared {name}": tensor for name, tensor in federation.shared.items()}
    found |= {f"server {name}": tensor for name, tensor in federation.server.items()}
    for kind, clients in (("last", federation.last), ("private", federation.engine.private)):
        for client in clients:
            found |= {f"{kind} {name} of client {client}": tensor for name, tensor in clients[client].items()}
    return found


def farthest(trial: Trial, other: Federation) -> tuple[str, float]:
    """Return the tensor that differs most from the plain run, as a share of what is allowed."""
    before, expected, found = state_of(trial.federation()), state_of(trial.plain), state_of(other)
    moves, differences = dict[str, float](), dict[str, float]()
    for name, tensor in expected.items():
        if name not in found or found[name].shape != tensor.shape:
            return name, torch.inf
        start = before.get(name)
        known = start is not None and start.shape == tensor.shape
        moves[name] = distance(tensor, start) if known and start is not None else float(tensor.double().norm())
        differences[name] = distance(found[name], tensor)
    least = NEGLIGIBLE * max(moves.values(), default=0.0)
    shares = {"": 0.0}
    for name, difference in differences.items():
        allowed = ROUNDING * moves[name] + RESOLUTION * float(expected[name].double().norm()) + least
        shares[name] = difference / allowed if difference else 0.0
    return max(shares.items(), key=lambda item: item[1])


def distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm())


def check_finite(what: str, tensors: Mapping[str, Tensor], client: int | None = None) -> None:
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            whose = "" if client is None else f" of client {client}"
            raise FedVLError(
                f"{name!r} of {what}{whose} is not finite; keep logarithms, roots and divisions away from 0, for padding "
                "too, or lower the learning rate of the preset."
            )


def called_twice(name: str, hook: Callable[..., Any], faults: list[str]) -> Callable[..., Any]:
    """Wrap a hook so that every call is made twice and compared."""

    @wraps(hook)
    def call(*arguments: Any) -> Any:
        kept, other = deepcopy(arguments), deepcopy(arguments)
        again, result = hook(*other), hook(*arguments)
        if not same(kept, arguments):
            faults.append(f"{name} modifies its arguments; make new tensors")
        if not same(again, result):
            faults.append(
                f"{name} gives different results for the same arguments; keep no state in attributes, and draw random "
                "numbers from the generator or from batch.noise"
            )
        return result

    return call


def same(left: Any, right: Any) -> bool:
    """Return whether arguments or results of hooks have the same bits; generators are ignored."""
    if isinstance(left, Tensor):
        alike = left.shape == right.shape and left.dtype == right.dtype
        return alike and (torch.equal(left, right) or torch.equal(left.nan_to_num(), right.nan_to_num()))
    if isinstance(left, Samples):
        return same(vars(left), vars(right))
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, Sequence) and not isinstance(left, str):
        return len(left) == len(right) and all(map(same, left, right))
    return isinstance(left, torch.Generator) or bool(left == right)
