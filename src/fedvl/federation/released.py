"""What a private run releases beside its noisy sums, and whether the budget covers it."""

from typing import Literal, NamedTuple

from fedvl.config import BY_CLIENT, Experiment
from fedvl.methods.base import Method, overrides
from fedvl.methods.roles import Private

Coverage = Literal["covered", "withheld", "not covered"]

OF_TESTS = (
    *("accuracy", "weighted_accuracy", "per_client_accuracy", "per_client_test_images", "worst_*", "client_deviation"),
    *(
        "macro_*",
        "ece",
        "ece_interval",
        "reliability*",
        "sure",
        "confusion",
        "per_class_recall",
        "right",
        "per_round",
        "record.accuracy",
    ),
    *("conditions", "embedding.*", "base_to_new", "base_to_new_right.*", "datasets", "backdoor_*", "round_to_target"),
)
OF_HOLDINGS = (
    *("partition_counts", "partition_note", "*per_client_mix_accuracy", "long_tail.*", "class_lists"),
    *("skipped_images", "notes"),
)
OF_ANSWERS = (
    *("record.cohort", "record.dropped", "record.refused", "refused_updates", "record.declared", "record.bytes_*"),
    *("bytes_*", "parties", "answers"),
)
OF_COSTS = ("local_flops", "flops_to_target", "chunk")


class Released(NamedTuple):
    """Something that leaves beside the noisy sums, or is withheld."""

    name: str
    keys: tuple[str, ...]  # patterns of its fields in result.json and, after "record.", in metrics.jsonl
    state: Coverage
    why: str


ALWAYS = (
    Released("model", ("state_sha256", "files_sha256.*"), "covered", "It is made of noisy sums alone."),
    Released(
        "clip and budget",
        ("record.clip", "record.privacy.*", "privacy.*"),
        "covered",
        "The clip follows noisy counts, and the noise follows from public numbers.",
    ),
    Released("training loss", ("record.loss", "per_round_loss"), "withheld", "Clients do not send it."),
    Released("temperature", ("temperature", "temperature_from"), "withheld", "It would be fitted to training images."),
    Released("pseudo-label figures", ("*pseudo_label*",), "withheld", "They would be of training images."),
    Released("best round", ("*validation*", "best_round"), "withheld", "Validation and patience are refused."),
    Released(
        "time and memory",
        ("*seconds*", "finished", "peak_*", "*memory*"),
        "not covered",
        "They depend on how many images clients have.",
    ),
)


def released(method: Method, experiment: Experiment, simulated: bool) -> list[Released]:
    """List what a private run releases beside its noisy sums, and what it withholds."""
    if experiment.privacy.unit == "none":
        return []
    found = [*ALWAYS, who_takes_part(experiment, simulated), figures_of_test(method, experiment)]
    record, protocol = experiment.privacy.unit == "record", experiment.evaluation.protocol
    if method.role.statistics:
        why = "About how many there are is public: the choice of the released sums follows from it."
        found.append(Released("numbers of images", OF_COSTS, "not covered", why))
    elif record:
        moves = ("record.usual_move", "record.drift*")
        found.append(Released("moves of clients", moves, "covered", "Clients add noise before they send anything."))
        why = "They are public: weights, steps and noise follow from them."
        found.append(Released("numbers of images", OF_COSTS, "not covered", why))
    elif simulated:
        why = "A simulation knows the largest client's."
        found.append(Released("numbers of images", OF_COSTS, "not covered", why))
    if simulated:
        why = "A simulation knows what each client holds; a server does not."
        found.append(Released("class counts, names of images", OF_HOLDINGS, "not covered", why))
    if keeps(method):
        why = "The server sees a salted hash of them, and so whether a client has some."
        why = "A simulation writes them into journal/." if simulated else why
        found.append(Released("tensors that clients keep", ("private_parameters",), "not covered", why))
    if protocol in ("open", "leave-one-domain-out"):
        why = "It is of a split that has training images too."
        found.append(Released("hash of the test", ("test_sha256",), "not covered", why))
    if experiment.data.newcomers:
        why = "They train when the run is over, without noise."
        found.append(Released("figures of newcomers", ("newcomers_*",), "not covered", why))
    if experiment.privacy.subspace is not None:
        found.append(Released("public subspace", (), "not covered", "The server's own images are not protected."))
    return found


def who_takes_part(experiment: Experiment, simulated: bool) -> Released:
    seen = "The server sees which clients answer"
    seen += "" if simulated else ", when, and with how many bytes"
    idle = "" if experiment.federation.secure_sum else "; one without images does not answer"
    return Released("who takes part", OF_ANSWERS, "not covered", f"{seen}{idle}.")


def figures_of_test(method: Method, experiment: Experiment) -> Released:
    by_client = experiment.evaluation.protocol in BY_CLIENT
    noisy = experiment.privacy.unit == "record" and not method.role.statistics  # tensors that clients keep
    if by_client and keeps(method) and not noisy:
        return Released("test figures", OF_TESTS, "not covered", "Tensors that clients keep have no noise, and answer.")
    return Released(
        "test figures", OF_TESTS, "covered", "They follow from the model and images that nobody trained on."
    )


def keeps(method: Method) -> bool:
    """Return whether clients have tensors of their own."""
    declared = any(isinstance(role, Private) for role in method.roles().values())
    return declared or overrides(method, "join")
