"""The words of an audit: headline, risks, recommendations, remedies, budget."""

from collections.abc import Sequence

from fedvl.audit.finding import BELOW, CLIENT, SERVER, SHOWN, USER, Epsilon, Finding, RemedyChange, Risk
from fedvl.config import Experiment

# The three risks by which European data protection authorities judge anonymisation (Opinion 05/2014)
SINGLING_OUT, LINKABILITY, INFERENCE = "singling out", "linkability", "inference"
RISKS = {
    "membership": SINGLING_OUT,
    "feature-recovery": SINGLING_OUT,
    "one-image-recovery": SINGLING_OUT,
    "picture": SINGLING_OUT,
    "feature-linking": LINKABILITY,
    "one-image-linking": LINKABILITY,
    "picture-linking": LINKABILITY,
    "label-histogram": INFERENCE,
    "label-probe": INFERENCE,
    "class-names": INFERENCE,
    "missing-modality": INFERENCE,
}
MEANINGS = {
    SINGLING_OUT: "to recognise that one image, and so one person, is among the training images",
    LINKABILITY: "to connect what leaves with an image that somebody has elsewhere",
    INFERENCE: "to conclude something about a client, such as which diagnoses it has and how often",
}
NOT_CLAIMED = (
    "These are attacks that were tried, not all that there are. A verdict is about the attack and these data; it does not "
    "prove that nothing can be found.",
    "The values are for these data, settings and rounds. More rounds, fewer images a client or smaller batches usually leak "
    "more.",
    "The attacker follows the protocol. A server that hands out tensors made to make images leak, or clients that work "
    "together, were not tried.",
    "What the pretrained model itself reveals of the images that it was once trained on is not part of this.",
)


def risk_of(name: str) -> str:
    """Return the risk that an attack is about."""
    fitting = [start for start in RISKS if name.startswith(start)]
    return RISKS[max(fitting, key=len)]


def headline(findings: Sequence[Finding], view: str = SERVER) -> str:
    """Say in one sentence how many training images could be identified."""
    seen = [each for each in findings if each.view == view and each.name.startswith("membership")]
    tried = [each for each in seen if each.name.endswith("-at-1-percent")]
    if not seen:
        return f"Whether {view} could identify training images from these messages was not measured."
    of_pairs = not tried  # too few images for a threshold: how often the right one of two is picked
    best = max(tried or seen, key=lambda each: (each.verdict == SHOWN, each.value))
    low, high = (round(100 * limit) for limit in best.interval)
    share, chance = round(100 * best.value), round(100 * best.chance)
    what = "pick the training image out of two" if of_pairs else "identify {} training images at 1 % false alarms"
    of = f"{chance} of 100 cases" if of_pairs else f"{chance} of 100"

    def said(number: str) -> str:
        return f"{what} in {number} cases" if of_pairs else what.format(number)

    if best.verdict == SHOWN:
        return (
            f"With these messages {view} could {said(f'{share} of 100')} (chance: {of}; 95 % interval {low} to {high})."
        )
    if best.verdict == BELOW:
        return f"With these messages {view} could {said(f'at most {high} of 100')}, by the attacks that were tried (chance: {of})."
    return (
        f"It was not shown that {view} could identify training images from these messages; it could {said(f'up to {high} of 100')} "
        f"(chance: {of}): too few images or clients were attacked to say more."
    )


def by_risk(findings: Sequence[Finding]) -> list[Risk]:
    """Say for each risk what was shown."""
    found = []
    for risk, meaning in MEANINGS.items():
        own = [each for each in findings if risk_of(each.name) == risk]
        shown = sorted({f"{each.name} by {each.view}" for each in own if each.leaks})
        said = f"shown: {', '.join(shown)}" if shown else "not shown by the attacks tried" if own else "not examined"
        found.append(Risk(risk=risk, meaning=meaning, said=said, state="shown" if shown else "open"))
    return found


def recommend(
    findings: Sequence[Finding],
    unexamined: Sequence[str],
    experiment: Experiment,
    epsilon: Epsilon | None = None,
) -> list[str]:
    """Say what to do."""
    shown = {each.view for each in findings if each.leaks}
    summed, noise, found = experiment.federation.secure_sum, experiment.privacy.unit != "none", []
    if unexamined:
        found.append(
            f"Do not rely on this audit for {', '.join(unexamined)}: nothing examined it. Remove it from the messages, or have "
            "it assessed by other means."
        )
    if SERVER in shown and not summed:
        found.append(
            "Use secure aggregation (--secure-sum), so that the server sees sums over clients only; if the method refuses it, "
            "use one that is averaged."
        )
    if SERVER in shown and summed:
        found.append("Sum over more clients (federation.least_clients), or add noise (--privacy client:eps=3).")
    if shown & {CLIENT, USER} and not noise:
        found.append(
            "Add noise (--privacy client:eps=3): secure aggregation does not change what clients and users see."
        )
    if SERVER in shown and noise and not summed and experiment.privacy.unit == "record":
        found.append("Combine record-level noise with secure aggregation: noise on images does not hide class shares.")
    if epsilon and epsilon.violated:
        found.insert(
            0, "Stop: the measured epsilon exceeds the claimed one, so that the privacy guarantee does not hold."
        )
    if not found:
        found.append(
            "No attack showed a leak. Keep the settings, and repeat the audit when data, method or number of clients change."
        )
    return found


def remedies(experiment: Experiment) -> list[str]:
    """Say what is switched on, and how the values are to be read with it."""
    federation, privacy, found = experiment.federation, experiment.privacy, []
    if federation.secure_sum:
        found.append(
            f"Secure aggregation: the server sees sums over all clients of a round, {federation.least_clients} at least. The "
            "values of its view are of the sum of all who trained; a sum over fewer clients would say more of each."
        )
        found.append(
            "Not covered by secure aggregation: a server that sends the same model in two rounds and says that one client was "
            "lost in one of them learns that client's update from the difference of both sums. Each such round is an entry "
            + (
                "'left_out' in that client's log; the noise of each client bounds what the difference tells."
                if privacy.unit == "client"
                else "'left_out' in that client's log; only client-level noise (--privacy client:eps=3) bounds what it tells."
            )
        )
    if privacy.unit == "client":
        found.append(
            "Noise on the mean of the updates, which hides whether a client took part from all who see the model. "
            + (
                "Each client adds its share of it before it is summed, so that the server sees it in the sum too."
                if federation.secure_sum
                else "The server adds it, so that the values of its view are without it."
            )
        )
    if privacy.unit == "record":
        found.append(
            "Noise in each client's own training, which hides single images; the values are of what it sends with it."
        )
    return found


def changes_of(findings: Sequence[Finding], experiment: Experiment) -> list[RemedyChange]:
    """Say of each remedy whether it is on, and which values it changes."""
    summed, unit = experiment.federation.secure_sum, experiment.privacy.unit
    server = [each for each in findings if each.view == SERVER]
    of_images = [each for each in findings if risk_of(each.name) in (SINGLING_OUT, LINKABILITY)]

    def named(chosen: Sequence[Finding]) -> str:
        names = ", ".join(dict.fromkeys(each.name for each in chosen))
        return f"it changes {names}" if names else "it changes none of these values"

    return [
        RemedyChange(
            remedy="Secure aggregation",
            option="--secure-sum",
            on=summed,
            changes=f"The server sees sums over clients only: {named(server)}, from the view of the server. Other views stay.",
        ),
        RemedyChange(
            remedy="Noise on clients' updates",
            option="--privacy client:eps=3",
            on=unit == "client",
            changes=f"Bounds what tells whether a client took part: {named(findings)}, from the views of other clients and "
            "users; from that of the server with secure aggregation only.",
        ),
        RemedyChange(
            remedy="Noise in clients' training",
            option="--privacy record:eps=8",
            on=unit == "record",
            changes=f"Bounds what tells of a single image: {named(of_images)}, from every view. Class shares stay.",
        ),
    ]


def budget(experiment: Experiment) -> str | None:
    """Say what the planned rounds may spend."""
    privacy = experiment.privacy
    if privacy.unit == "none":
        return None
    whose, sampled = "image", "each image is in a step by a secret chance (Poisson sampling)"
    if privacy.unit == "client":
        whose, sampled = "client", "every client takes part in every round"
        if (experiment.federation.per_round or experiment.data.clients) < experiment.data.clients:
            sampled = "each client takes part in a round by a secret chance (Poisson sampling)"
    return (
        f"At most epsilon {privacy.epsilon:g} at delta {privacy.delta:g} for each {whose}, over all planned rounds; "
        f"{sampled}."
    )
