"""Run an experiment: preparation -> rounds -> evaluation -> the files of the run."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fedvl.config import Experiment
from fedvl.data.sources import OPEN_ANEW, Opener
from fedvl.display import Display, Silent, when_slow
from fedvl.errors import FedVLError
from fedvl.evaluation.judge import Judge, Judged
from fedvl.federation.attacks import Attack, AttackedEngine, poisoned
from fedvl.federation.checks import fits_shape
from fedvl.federation.count_noise import CountNoise, count_noise
from fedvl.federation.journal import Journal
from fedvl.federation.local import LocalEngine
from fedvl.federation.privacy import Subspace, directions, noise_seed, privacy_of
from fedvl.federation.processes import Processes
from fedvl.federation.records import Record, RoundFigures
from fedvl.federation.round import Engine, Federation
from fedvl.federation.statistics import Statistics
from fedvl.federation.statistics_privacy import statistics_privacy
from fedvl.methods.base import Method
from fedvl.methods.mistakes import check_names, explained
from fedvl.runs import memory
from fedvl.runs.answers import write_answers
from fedvl.runs.contents import Examples, Figures, Result
from fedvl.runs.diagnosis import first_step_faults
from fedvl.runs.evaluation import evaluate_test
from fedvl.runs.folder import RunFolder
from fedvl.runs.looking import OnRound, look
from fedvl.runs.preparation import Prepared, Training, prepare
from fedvl.runs.result import describe, example_images, fitted_temperature, memory_figures, pseudo_label_figures
from fedvl.seeding import torch_generator
from fedvl.tensors import ByClient, Tensors, placed


def complete(
    folder: RunFolder,
    display: Display,
    opener: Opener = OPEN_ANEW,
    processes: Processes | None = None,
    known: Callable[[Prepared], Statistics] | None = None,
    on_round: OnRound | None = None,
) -> Result:
    """Return the result of a run with its clients in this process; bring it to its end first.

    Of several ``processes`` this is the first; the others train what it shares out. ``known`` are
    sums that follow from another run, so that no client is asked. ``on_round`` looks at each round.
    """
    if folder.finished:
        return folder.result
    torch.set_num_threads(folder.experiment.federation.threads)  # text features depend on it too
    with explained(folder.experiment.method.name) as tried:
        prepared = prepare(folder.experiment, display, opener)
        tried.method, tried.samples = prepared.method, prepared.training.samples
        check_names(prepared.experiment.method.name, prepared.method, prepared.training.samples)
        engine = local_engine(prepared)
        if folder.experiment.method.is_own and folder.experiment.privacy.unit == "none":
            prepared.notes.extend(first_step_faults(prepared.method, engine))
        engine.known = known and known(prepared)
        if processes:
            processes.begin()
            engine.processes = processes
        engine.progress = when_slow(display.stage("This round"))
        return run_rounds(folder, prepared, engine, display, on_round=on_round)


def help_with(experiment: Experiment, processes: Processes) -> None:
    """Train clients for the first process of a run, until it ends."""
    torch.set_num_threads(experiment.federation.threads)
    processes.help(lambda: local_engine(prepare(experiment, Silent())))


def local_engine(prepared: Prepared) -> LocalEngine:
    """Make the engine that trains all clients in this process, with a simulation's noise."""
    engine = engine_of(prepared)
    engine.private_seed = noise_seed(prepared.experiment)
    return engine


def engine_of(prepared: Prepared) -> LocalEngine:
    """Make the engine, with hostile clients if some are to be simulated."""
    experiment, training = prepared.experiment, prepared.training
    settings = (experiment.training, experiment.federation, experiment.seed, experiment.privacy)
    if experiment.federation.attack is None:
        return LocalEngine(prepared.method, training.samples, training.rows, *settings)
    attack = Attack.parse(experiment.federation.attack)
    hostile = attack.clients(len(training.rows), experiment.seed)
    theirs = torch.cat([training.rows[0][:0], *(training.rows[client] for client in sorted(hostile))])
    classes = len(prepared.method.task.class_names)
    samples = poisoned(attack.kind, training.samples, theirs, classes, experiment.seed)
    engine = AttackedEngine(prepared.method, samples, training.rows, *settings)
    engine.attack, engine.hostile = attack, hostile
    return engine


def root_engine(experiment: Experiment, method: Method, training: Training) -> LocalEngine | None:
    """Make the engine of the server's own images, if updates are compared with what they say."""
    if experiment.federation.robust != "root":
        return None
    settings = (experiment.training, experiment.federation, experiment.seed)
    return LocalEngine(method, training.samples, [training.root], *settings)


def public_subspace(experiment: Experiment, method: Method, start: Tensors, training: Training) -> Subspace | None:
    """Return where clients' updates may move, by the server's own images, if it is asked for."""
    if experiment.privacy.subspace is None:
        return None
    images = training.samples.inputs["features"][training.root]
    names = frozenset(name for name in start if method.role.shared(name).features)
    return Subspace(directions(images, experiment.privacy.subspace), names)


def noise_on_counts(experiment: Experiment, method: Method, start: Tensors) -> CountNoise | None:
    """Return the noise that clients' reports need, if clients are to be hidden."""
    federation = experiment.federation
    shares = federation.least_clients if federation.secure_sum else 1
    return count_noise(method, start, federation.rounds, shares) if experiment.privacy.unit == "client" else None


def make_judge(prepared: Prepared, engine: Engine) -> Judge:
    """Make the judge of a run: each client's own tensors answer where the protocol is personal."""
    pooled = prepared.method.scope == "pooled"  # then client 0 holds everything
    return Judge(
        prepared.queried,
        prepared.test.samples,
        prepared.experiment.evaluation.batch_size,
        prepared.test.parts,
        prepared.test.conditions,
        lambda client: engine.private_of(0 if pooled else client),
        prepared.test.candidates,
        prepared.for_new,
        prepared.test.new,
    )


def make_validator(prepared: Prepared, judge: Judge) -> Judge | None:
    """Make the judge of the images that clients hold out of their training images, if they do."""
    held = prepared.training.validation
    if held is None:
        return None
    return replace(judge, method=prepared.method, test=held.samples, parts=held.parts, conditions={})


def newcomer_figures(prepared: Prepared, federation: Federation, judge: Judge) -> Figures:
    """Return the accuracy of clients that join last: as they come, and after a round of theirs."""
    rows, experiment = prepared.training.newcomers, prepared.experiment
    clients = [client for client, own in enumerate(rows) if len(own)]
    if not clients or not any(map(len, prepared.test.newcomers)):
        return Figures()
    engine = LocalEngine(
        prepared.method, prepared.training.samples, rows, experiment.training, experiment.federation, experiment.seed
    )
    asked = replace(judge, parts=prepared.test.newcomers, private_of=engine.private_of)
    shared, last, method = federation.shared, federation.last, prepared.method
    handed = {client: method.hand_out(shared, last, client) for client in clients}
    found = {"": asked.judge(shared, last)}
    if method.role.statistics:
        engine.personalise(shared)
        if engine.private:
            found["trained_"] = asked.judge(shared, last)
    else:
        begun = len(federation.records)  # as if they were chosen in the next round
        trained = {result.update.client: result for result in engine.train(begun, clients, shared, handed)}
        own = {client: {**result.update.tensors, **result.private} for client, result in trained.items()}
        found["trained_"] = asked.judge_models(lambda client: own.get(client, shared))
    if zero_shot := asked.judge_zero_shot():
        found["zero_shot_"] = zero_shot
    return Figures(
        **{
            f"newcomers_{kind}{key}": judged.figures[key]
            for kind, judged in found.items()
            for key in ("accuracy", "per_client_accuracy")
        }
    )


def make_federation(
    prepared: Prepared, engine: Engine, journal: Journal | None = None, secret: int | None = None
) -> Federation:
    """Make the federation of a run before its first round, with its rule and its noise."""
    experiment, method = prepared.experiment, prepared.method
    noise = noise_seed(experiment) if secret is None else secret
    start = placed(method.start(torch_generator(experiment.seed, "start")), prepared.device)
    return Federation(
        method,
        engine,
        experiment.federation.model_copy(update={"withdrawn": experiment.absent}),
        experiment.seed,
        start,
        journal=journal,
        device=prepared.device,
        root=root_engine(experiment, method, prepared.training),
        privacy=statistics_privacy(method, experiment.privacy, experiment.federation, noise)
        or privacy_of(
            experiment,
            noise,
            public_subspace(experiment, method, start, prepared.training),
            noise_on_counts(experiment, method, start),
        ),
    )


def check_restored(federation: Federation, start: Tensors, folder: RunFolder) -> None:
    """Refuse tensors of a journal that are not those that the method makes."""
    role = federation.method.role
    shapes = {name: role.shared(name).shape or tuple(tensor.shape) for name, tensor in start.items()} | role.sent_shapes
    owners = {*federation.last, *federation.engine.private}
    names = {*federation.shared, *federation.server}
    fine = names == start.keys() and all(0 <= client < federation.engine.clients for client in owners)
    for tensors in (federation.shared, federation.server, *federation.last.values()):
        for name, tensor in tensors.items():
            fine = fine and name in shapes and fits_shape(tensor, shapes[name]) and bool(tensor.isfinite().all())
    if not fine:
        raise FedVLError(
            f"The tensors in {folder.path / 'journal'} are not those of this run's method; restore that folder from a copy, "
            "or delete it to begin again."
        )


def run_rounds(
    folder: RunFolder,
    prepared: Prepared,
    engine: Engine,
    display: Display,
    secret: int | None = None,
    told: Callable[[], Figures] = Figures,
    on_round: OnRound | None = None,
) -> Result:
    """Run the rounds still to come, wherever the clients are, and write the result.

    The noise that hides clients is drawn from ``secret``, or from the seed in simulation. ``told``
    says what else the result holds, once the rounds are over.
    """
    experiment = prepared.experiment
    torch.set_num_threads(experiment.federation.threads)
    memory.begin(prepared.device)
    judge = make_judge(prepared, engine)
    validator = make_validator(prepared, judge)
    tested = experiment.evaluation.test and len(prepared.test.samples) > 0
    zero_shot = judge.judge_zero_shot() if experiment.evaluation.test else None
    federation = make_federation(prepared, engine, folder.journal, secret)
    start = {**federation.shared, **federation.server}
    untrained = validator.judge(federation.shared, {}).figures["accuracy"] if validator and federation.trains else None
    rounds = experiment.federation.rounds if federation.trains else 0
    judged: list[tuple[Judged, float]] = []  # and the seconds that it took
    peaks = dict[int, memory.Peak]()  # until the end of each round that this process ran

    def judge_now(shared: Tensors, last: ByClient) -> Judged:
        began = time.perf_counter()
        found = judge.judge(shared, last)
        judged.append((found, time.perf_counter() - began))
        return found

    def evaluate(shared: Tensors, last: ByClient, round_number: int) -> RoundFigures:
        found = RoundFigures()
        if round_number % experiment.evaluation.every and round_number != rounds:
            return found
        if validator is not None:
            found = RoundFigures(validation=validator.judge(shared, last).figures["accuracy"])
        elif tested:
            found = RoundFigures(accuracy=judge_now(shared, last).figures["accuracy"])
        return found.joined(pseudo_label_figures(prepared, federation))

    if federation.trains:
        federation.restore()
        check_restored(federation, start, folder)
        folder.write_rounds(federation.records)
        show = display.rounds(rounds, federation.records, zero_shot.figures["accuracy"] if zero_shot else None)

        def after_round(record: Record) -> None:
            folder.append_round(record)
            show(record)
            peaks[record.round] = memory.peak(prepared.device)
            if on_round is not None:
                look(on_round, record, federation.shared, {k: engine.private_of(k) for k in record.cohort}, folder.path)

        federation.run(evaluate, after_round)
        if federation.best:
            federation.return_to_best()
            check_restored(federation, start, folder)
    if tested and not judged:  # nothing was trained, or all of it before this process began
        judge_now(federation.shared, federation.last)
    in_use = memory.peak(prepared.device)  # before what describes the run needs some too
    fitted, calibrated = fitted_temperature(prepared, federation, validator), None
    if tested and fitted:
        calibrated = replace(judge, temperature=fitted.value).judge(federation.shared, federation.last)
    result = describe(prepared, federation, judge, zero_shot, judged, fitted, calibrated).joined(
        memory_figures(in_use, peaks, experiment.evaluation.target_accuracy, federation.records),
        newcomer_figures(prepared, federation, judge),
        Figures() if untrained is None else Figures(untrained_validation_accuracy=untrained),
        told(),
    )
    examples = example_images(prepared, judged[-1][0], zero_shot) if tested else Examples()
    if tested:
        evaluate_test(folder, result, judge, validator, (federation.shared, federation.last))
        write_answers(folder, prepared, calibrated or judged[-1][0])
    folder.finish(result, examples, federation.shared, federation.last, federation.server)
    return folder.result
