"""What a person should know at the end of a run, in a few lines below its table."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedvl.evaluation.shapley import Contributions
from fedvl.evaluation.statistics import Paired
from fedvl.report.privacy import not_covered, sentences
from fedvl.report.reading import evaluated_rounds, images_tested, number, paired
from fedvl.report.tables import p_value, percent, sure_rows
from fedvl.runs.contents import Measured, Result, Withdrawal

if TYPE_CHECKING:
    from fedvl.runs.contributions import Plan

TOY = "fedvl-tiny"
EMBEDDED = ("cifar10-mini", "emoji-mini")
REASONS = 3  # for which images were skipped, that are named
NOTES = 5
FEWEST = 30  # test images, of which the course of accuracy can be told
LARGE_ERROR = 5.0  # points of calibration error from which a temperature is worth its images
TUNED = "embedded"  # preset
SIGNIFICANT = 0.05
BARELY = 0.02  # share of the test images with another answer, of a model that has hardly moved
LAST = 3  # the part of the rounds, from the end, in which a rise counts as one that goes on: a third


def ending(result: Result) -> list[str]:
    """Return who took part, how accuracy went, what was left out, and what to try next."""
    lines = [
        took_part(result),
        *no_better(result),
        *course(result),
        *true_pseudo_labels(result),
        *skipped(result),
        *budget(result),
        *calibration(result),
    ]
    notes = result.notes
    lines += notes[:NOTES]
    if len(notes) > NOTES:
        lines.append(f"{len(notes) - NOTES} more notes are in the report.")
    if (result.model or "").startswith(TOY) and result.dataset not in EMBEDDED:
        lines.append(f"{result.model} is a toy model: for real photos use --model openai/clip-vit-base-patch32.")
    return [line for line in lines if line]


def calibration(result: Result) -> list[str]:
    """Return what the shares of answers are worth and, if asked, how many are unsure."""
    lines, least = [], number(result.setting("evaluation", "unsure"))
    if result.temperature is not None and result.uncalibrated_ece is not None and result.ece is not None:
        lines.append(
            f"Shares are those of scores divided by {result.temperature:.3g}, fitted to {result.temperature_from}: the "
            f"calibration error is {result.ece:.1f} instead of {result.uncalibrated_ece:.1f} points."
        )
    elif result.temperature is None and not result.privacy and (result.ece or 0.0) > LARGE_ERROR:
        lines.append(
            f"Shares are wrong by {result.ece:.1f} points: --set evaluation.validation=0.2 fits a temperature to held-out images."
        )
    lines += [
        f"{row.label}: {row.text}."
        for row in sure_rows(result)
        if row.label == f"Unsure below {100 * (least or 0):g} %"
    ]
    return lines


def took_part(result: Result) -> str:
    """Return clients, partition, rounds, seed and test images."""
    tested = images_tested(result)
    parts = [
        ", ".join(party.name for party in result.parties if party.took_part) or several(result.clients, "client"),
        result.partition or "",
        several(result.rounds, "round"),
        f"seed {result.seed}" if result.seed is not None else "",
        f"{several(tested, 'test image')}; in brackets, intervals of 95 %" if tested else "",
    ]
    return ", ".join(part for part in parts if part) + "."


def budget(result: Result) -> list[str]:
    """Return what epsilon assumes, is of, and leaves out."""
    uncovered = not_covered(result)
    listed = [f"The budget does not cover: {', '.join(uncovered)} (the report says why)."] if uncovered else []
    return [*sentences(result), *listed]


def several(value: object, noun: str) -> str:
    known = number(value)
    return "" if known is None else f"{known:,.0f} {noun}{'' if known == 1 else 's'}"


def course(result: Result) -> list[str]:
    """Return the best and the last round, and whether accuracy still rises or has fallen.

    A change counts if it is more than one standard error of the last accuracy.
    """
    if result.setting("federation", "rounds") == 0 and result.method != "zero-shot":
        return ["No round was run, so nothing was trained over rounds: raise --rounds to train."]
    if result.best_round is not None:
        return [
            f"Round {result.best_round} of {several(result.rounds, 'round')} is the best on "
            f"{several(result.validation_images, 'validation image')} "
            f"({percent(result.validation_accuracy)}); its model is kept."
        ]
    values = result.per_round
    curve = [
        (at, value)
        for at, value in zip(evaluated_rounds(result, len(values)), map(number, values), strict=True)
        if value is not None
    ]
    count = images_tested(result)
    if 0 < count < FEWEST:
        return [f"Only {several(count, 'test image')}: the accuracies say little."]
    if len(curve) < 2 or not count:
        return []
    best_round, best = max(curve, key=lambda pair: pair[1])
    last_round, last = curve[-1]
    share = min(max(last / 100, 0.0), 1.0)
    error = 100 * math.sqrt(max(share * (1 - share), 1 / (4 * count)) / count)
    if best_round == last_round:
        line = f"Round {last_round}, the last, is the best: {percent(last)}."
        before = curve[-1 - max(1, len(curve) // LAST)][1]
        more = f" Still rising: try more rounds (--rounds {2 * last_round})." if last - before > error else ""
    else:
        line = f"Best round {best_round}: {percent(best)}; last round {last_round}: {percent(last)}."
        fell = f" It fell since round {best_round}: try fewer rounds or a lower learning rate."
        more = fell if best - last > error else ""
    return [line + more]


def no_better(result: Result) -> list[str]:
    """Say that training does not beat zero-shot beyond chance, and which setting to change.

    McNemar's exact test on the test images, those of all clients together.
    """
    test = paired(result.zero_shot_right, result.right)
    if test is None or not result.rounds or (test.p < SIGNIFICANT and test.gained > test.lost):
        return []
    worse = test.p < SIGNIFICANT
    how = f"{test.gained} of {test.images:,} test images gained and {test.lost} lost, {p_value(test.p)}"
    found = f"Below zero-shot beyond chance ({how})" if worse else f"Not better than zero-shot beyond chance ({how})"
    return [f"{found}: {what_to_change(result, test)}."]


def what_to_change(result: Result, test: Paired) -> str:
    """Return the setting that is likeliest to help: what was tuned for this model, or the rate."""
    training, method = result.config.get("training"), result.config.get("method")
    rate = number(training.get("learning_rate")) if isinstance(training, dict) else None
    if result.privacy is not None:
        return "the noise may be too much; raise privacy.epsilon, or train with more clients or images"
    if rate is None or not any(loss is not None for loss in result.per_round_loss):
        return "train with more labelled images (data.shots, data.client_shots)"
    own = method if isinstance(method, dict) else {}
    packaged = not str(own.get("name")).endswith(".py") and "@" not in str(own.get("name"))
    if (result.model or "").startswith(TOY) and packaged and own.get("preset") != TUNED:
        return f"--preset {TUNED} has settings that were tuned for {result.model}"
    if test.gained + test.lost < BARELY * test.images:
        return (
            f"it hardly changes a prediction; try a higher rate, training.learning_rate={10 * rate:g}, or more rounds"
        )
    return f"try a lower rate, training.learning_rate={rate / 10:g}, or choose one by fedvl sweep"


def true_pseudo_labels(result: Result) -> list[str]:
    """Return the share of true pseudo-labels at the first, last and worst selection."""
    values = result.per_round_pseudo_label_accuracy
    curve = [
        (value, at)
        for at, value in zip(evaluated_rounds(result, len(values)), map(number, values), strict=True)
        if value is not None
    ]
    if not curve:
        return []
    (first, start), (last, end), (least, at) = curve[0], curve[-1], min(curve)
    if least == max(curve)[0]:
        return [f"True pseudo-labels: {percent(last)}."]
    lowest = f", the lowest {percent(least)} in round {at}" if least < min(first, last) else ""
    return [f"True pseudo-labels: {percent(first)} in round {start}, {percent(last)} in round {end}{lowest}."]


def skipped(result: Result) -> list[str]:
    """Return how many images could not be used and why, with one of them for each reason."""
    images = result.skipped_images
    if not images:
        return []
    reasons = Counter(image.reason.rstrip(".") for image in images)
    first = {image.reason.rstrip("."): image.image for image in reversed(images)}
    if len(reasons) == 1:
        (reason,) = reasons
        return [f"{several(len(images), 'image')} skipped because {reason} (such as {first[reason]})."]
    told = [f"{count} because {reason} (such as {first[reason]})" for reason, count in reasons.most_common(REASONS)]
    rest = sum(reasons.values()) - sum(count for _, count in reasons.most_common(REASONS))
    told += [f"{rest} for other reasons, which the report has"] if rest else []
    return [f"{several(len(images), 'image')} skipped: {'; '.join(told)}."]


def withdrawal_sentences(measured: Withdrawal) -> list[str]:
    """Say in words what a withdrawal changes."""
    run, without = measured.run, measured.without
    who = measured.party or f"client {measured.client}"
    low, high = measured.difference_interval
    told = [
        f"With {who}: {accuracy_of(run)}; without: {accuracy_of(without)}, on the same {measured.images:,} test images.",
        f"Difference: {measured.difference:+.2f} points (95 % interval {low:+.2f} to {high:+.2f}, paired). "
        f"{measured.changed:.2f} % of the answers changed "
        f"({measured.changed_interval[0]:.2f} to {measured.changed_interval[1]:.2f}).",
    ]
    if measured.moved:
        share = 100 * measured.distance / measured.moved
        told.append(f"The trained tensors lie {share:.1f} % as far apart as training moved them.")
    spent = measured.privacy
    if not measured.same_draws:
        drawn = "Noise and samples are drawn anew" if spent else "Parties draw from new secrets in every run"
        told.append(f"{drawn}, so that part of the difference is chance.")
    if spent:
        told.append(
            f"Budgets add: both models together spend epsilon {spent.epsilon:.2f}, delta {spent.delta:g}, of each "
            f"{spent.of} that is in both."
        )
    return told


def accuracy_of(run: Measured) -> str:
    bounds = run.interval
    return f"{run.accuracy:.2f} %" + (f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else "")


def contribution_lines(found: Contributions, names: Sequence[str]) -> list[str]:
    """Return a table of what each client contributes, in points, and what the columns mean."""
    rows = [("client", "without it", "Shapley value", "95 % interval" if found.intervals else "")]
    for place, name in enumerate(names):
        bounds = "{:+.2f} to {:+.2f}".format(*found.intervals[place]) if found.intervals else ""
        rows.append((name, f"{-found.leave_one_out[place]:+.2f}", f"{found.shapley[place]:+.2f}", bounds))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    how = f"estimated from {found.orders} random orders" if found.orders else "exact"
    return [
        *table,
        f"Points of accuracy: {found.total:.2f} % with all clients, {found.empty:.2f} % before the first round. "
        f"Shapley values are {how} and add up to the difference; {found.valued:,} models were valued.",
    ]


def cost_warning(plan: "Plan") -> str | None:
    """Say how long coalitions take, where each is trained."""
    if not plan.retrains:
        return None
    minutes = max(1, round(plan.coalitions * plan.seconds / 60))
    shorter = "; draw fewer orders with --orders" if plan.orders else "; --orders 10 draws ten random orders instead"
    return f"Up to {plan.coalitions:,} models are trained, about {minutes:,} minutes or more{shorter}."
