"""Say in words what a privacy budget is of, what it assumes, and what it does not cover."""

from fedvl.federation.records import Budget
from fedvl.runs.contents import Result

SECRET = (
    "Epsilon assumes that the noise is secret; in this simulation the seed is published, and the noise follows from it."
)
HISTOGRAM = (
    "Record level hides images, not how many of each class a client has: these can be read from its update. Add "
    "--secure-sum, so that the server sees sums over clients alone."
)


def budget_of(result: Result) -> Budget:
    """Return the budget of a private run."""
    assert result.privacy is not None
    return result.privacy


def spent_on(result: Result) -> str:
    """Return the unit of the budget: client, image, or the column of whose images they are."""
    spent = budget_of(result)
    if spent.unit == "client":
        return "client"
    return str(spent.of or result.setting("data", "unit") or "image")


def statement(result: Result) -> str:
    """Return epsilon, delta, unit and sampling in one line."""
    spent = budget_of(result)
    return f"epsilon {spent.epsilon:.2f}, delta {spent.delta:g}, of each {spent_on(result)}; {spent.sampling}"


def neighbours(result: Result) -> str:
    """Say which two datasets are hard to tell apart."""
    unit = spent_on(result)
    if unit == "client":
        return (
            "Neighbouring datasets: with all images of one client, and with none of them. The list of clients, and who "
            "answers, is public."
        )
    if budget_of(result).sums:
        return (
            "Neighbouring datasets: with one image of a client, and without it. About how many images all clients have "
            "together is public: the noise does not depend on it, the choice of the released sums does."
        )
    if unit == "image":
        return (
            "Neighbouring datasets: with one image of a client, and with an empty one in its place, which has no gradient. "
            "The number of a client's images is public and the same in both. To replace an image by another is two such "
            "changes: twice epsilon, at a larger delta."
        )
    return (
        f"Neighbouring datasets: with all images of one {unit} at a client, and with empty ones in their place, which have no "
        f"gradient. The numbers of each client's images, and of its units ({unit}), are public and the same in both."
    )


def group(result: Result) -> list[str]:
    """Say what several images of one person add up to, where the budget is of one image."""
    spent = budget_of(result)
    if spent_on(result) != "image":
        return []
    if not spent.group:
        return ["Epsilon is of one image: k images of one person have k x epsilon together, at a larger delta."]
    column, largest = spent.group.column, spent.group.largest
    if largest < 2:
        return []
    return [
        f"Epsilon is of one image: the images of one {column} have k x epsilon together, at a larger delta; there are up to "
        f"{largest}, so epsilon {largest * spent.epsilon:.3g}. With --unit {column} the budget is of each {column}."
    ]


def sentences(result: Result) -> list[str]:
    """Return what a reader of epsilon must know; nothing without a budget."""
    spent = result.privacy
    if not spent:
        return []
    machines = bool(result.parties or result.party)
    simulated = not machines if spent.simulated is None else spent.simulated  # older runs do not say
    alone = spent.unit == "record" and not result.setting("federation", "secure_sum")
    sums = [f"Released with noise: {', '.join(spent.sums)}."] if spent.sums else []
    return [*([SECRET] * simulated), *sums, neighbours(result), *group(result), *([HISTOGRAM] * alone)]


def beside(result: Result) -> list[tuple[str, str, str]]:
    """Return rows of what leaves beside the noisy sums: what, whether it is covered, why."""
    return [(item.name, item.state, item.why) for item in (result.privacy.released if result.privacy else [])]


def not_covered(result: Result) -> list[str]:
    return [name for name, state, _ in beside(result) if state == "not covered"]
