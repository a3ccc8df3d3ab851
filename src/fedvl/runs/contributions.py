"""What each client contributes to the accuracy of a finished run, by the models of coalitions.

The value of a coalition is the test accuracy of the model that its clients make, with the settings
and the seed of the run. The empty coalition has the model before the first round.

Between machines the server values the sums that each client sent, on its own test images. It has
them if the run is one exchange without noise or secure aggregation, which clients' policies allow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedvl.config import Experiment
from fedvl.data.sources import Opener
from fedvl.display import Display, Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.shapley import MAX_EXACT, Coalition, Contributions, Game, shapley_values
from fedvl.federation.statistics import no_statistics, statistics_over
from fedvl.runs.contents import Seconds
from fedvl.runs.experiment import local_engine, make_federation, make_judge
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared, prepare
from fedvl.runs.update import by_sums
from fedvl.runs.withdrawal import with_withdrawn
from fedvl.tensors import Tensors, placed

ORDERS = 50  # random orders of more than MAX_EXACT clients


@dataclass(frozen=True)
class Plan:
    """How the coalitions of a run are valued."""

    players: tuple[int, ...]
    orders: int  # random orders to draw; 0: all coalitions
    coalitions: int  # that are valued at most
    retrains: bool  # each coalition, since the method does not follow from sums
    seconds: float  # of training the run, once


def plan_of(folder: RunFolder, orders: int | None) -> Plan:
    """Plan the coalitions of a run; refuse one whose coalitions have no common value."""
    experiment = folder.experiment
    check_coalitions(folder)
    players = players_of(folder)
    drawn = orders if orders is not None else 0 if len(players) <= MAX_EXACT else ORDERS
    if not drawn and len(players) > MAX_EXACT:
        raise FedVLError(f"All coalitions of {len(players)} clients are too many; draw orders with --orders {ORDERS}.")
    most = 2 ** len(players) if not drawn else min(2 ** len(players), (2 * drawn + 1) * len(players))
    return Plan(players, drawn, most, not by_sums(experiment), (folder.result.seconds or Seconds()).train or 0.0)


def players_of(folder: RunFolder) -> tuple[int, ...]:
    """Return the clients of a run; between machines those whose sums the server has."""
    experiment = folder.experiment
    if folder.federation is not None:
        return tuple(sorted(folder.tensors()[1]))
    return tuple(client for client in range(experiment.data.clients) if client not in experiment.absent)


def check_coalitions(folder: RunFolder) -> None:
    experiment = folder.experiment
    if folder.federation is not None and not (by_sums(experiment) and players_of(folder)):
        raise FedVLError(
            "The server has no sums of single clients, so that no coalition can be valued here; run ridge or gda without "
            "--secure-sum and --privacy, which clients answer if their policy.toml says single_statistics = true, or simulate "
            "the federation with fedvl run."
        )
    if experiment.evaluation.protocol != "closed" or not experiment.evaluation.test:
        raise FedVLError("Contributions are shares of one accuracy on one test; use --protocol closed with a test.")
    if experiment.privacy.unit != "none":
        raise FedVLError("Each coalition would spend the privacy budget again; run without --privacy.")
    if experiment.training.start_from:
        raise FedVLError(
            "A start from another run has the images of its clients in it; run without training.start_from."
        )
    per_round = experiment.federation.per_round
    if per_round and per_round < experiment.data.clients:
        raise FedVLError(
            f"In rounds of {per_round} of {experiment.data.clients} clients a coalition may be absent; run with "
            f"--per-round {experiment.data.clients}."
        )


def value_coalitions(folder: RunFolder, plan: Plan, display: Display) -> Contributions:
    """Value the coalitions of a run's clients, and divide its accuracy among them."""
    if folder.federation is not None:
        game = by_sent_statistics(folder)
    else:
        game = by_retraining(folder.experiment) if plan.retrains else by_statistics(folder.experiment)
    progress = display.stage("Valuing coalitions")
    counted = with_progress(game, plan.coalitions, progress)
    return shapley_values(counted, plan.players, plan.orders, folder.experiment.seed)


def by_retraining(experiment: Experiment) -> Game:
    """Return the game whose coalitions train the run's method from its start."""
    opener, everyone = Opener.once(), frozenset(range(experiment.data.clients))

    def value(coalition: Coalition) -> float:
        withdrawn = {*experiment.federation.withdrawn, *(everyone - coalition)} if coalition else set()
        prepared = prepare(with_withdrawn(experiment, withdrawn), Silent(), opener)
        engine = local_engine(prepared)
        federation = make_federation(prepared, engine)
        if coalition:
            federation.run()
        return float(make_judge(prepared, engine).judge(federation.shared, federation.last).figures["accuracy"])

    return value


def by_statistics(experiment: Experiment) -> Game:
    """Return the game whose coalitions solve from the sums of their clients' statistics."""
    prepared = prepare(experiment, Silent())
    samples, start = prepared.training.samples, start_of(prepared)
    each = [statistics_over(prepared.method, samples, rows, start) for rows in prepared.training.rows]
    return of_sums(prepared, start, dict(enumerate(each)))


def by_sent_statistics(folder: RunFolder) -> Game:
    """Return the game whose coalitions solve from the sums that clients sent to the server."""
    prepared = prepare(folder.experiment, Silent(), splits=("test",))
    each = {client: placed(sums, prepared.device) for client, sums in folder.tensors()[1].items()}
    return of_sums(prepared, start_of(prepared), each)


def start_of(prepared: Prepared) -> Tensors:
    return make_federation(prepared, local_engine(prepared)).shared


def of_sums(prepared: Prepared, start: Tensors, each: Mapping[int, Tensors]) -> Game:
    method, judge = prepared.method, make_judge(prepared, local_engine(prepared))

    def value(coalition: Coalition) -> float:
        total = no_statistics(method.role.statistics_shapes, prepared.device)
        for client in sorted(coalition):
            total = {name: tensor + each[client][name] for name, tensor in total.items()}
        return float(judge.judge(method.solve(start, total) if coalition else start, {}).figures["accuracy"])

    return value


def with_progress(game: Game, most: int, progress: Callable[[int, int], None]) -> Game:
    """Return the game, with progress after each coalition."""
    done = 0

    def value(coalition: Coalition) -> float:
        nonlocal done
        found = game(coalition)
        done += 1
        progress(done, most)
        return found

    return value
