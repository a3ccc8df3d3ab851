"""Confidence intervals of 95 %, and paired tests of two models on the same images."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedvl.files import Finite

Z = 1.959963984540054  # of the normal distribution, at 95 %
RESAMPLES = 1000
MIN_RESAMPLES = 100  # resamples
FEWER = 500  # resamples of a measure that is costly
MAX_DRAWS = 5_000_000  # of pairs of classes in all of them, about half a second
SEED = 0
MIN_PAIRED = 3  # seeds, for a paired t-test
SIGNIFICANT = 0.05  # p below which a difference is beyond chance
ROUNDED = 0.01  # as shares are shown: clients are not taken to differ by less
NEAR, NEARLY = 5.0, 1.5  # points above chance level, and times it

Numbers = NDArray[np.float64]
Spread = TypeVar("Spread", float, Numbers)


class Interval(NamedTuple):
    """Bounds of a value, in its own unit."""

    low: Finite
    high: Finite


class Areas(NamedTuple):
    """Areas under the ROC curves of two models on the same images, and of their difference."""

    first: float
    second: float
    interval: Interval  # of the second less the first
    p: float


class Paired(NamedTuple):
    """Two models on the same images: the second less the first, in points."""

    images: int
    gained: int  # images that only the second has right
    lost: int  # images that only the first has right
    difference: float
    interval: Interval
    p: float


def wilson(percent: float, count: float) -> Interval:
    """Return Wilson's interval of a share of `count` images, both in percent."""
    share = min(max(percent / 100, 0.0), 1.0)
    centre = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return Interval(100 * (centre - half) if share > 0 else 0.0, 100 * (centre + half) if share < 1 else 100.0)


def proportion(hits: int, trials: int) -> Interval:
    """Return Wilson's interval of hits / trials, as shares of 1."""
    low, high = wilson(100 * hits / trials, trials)
    return Interval(low / 100, high / 100)


def paired_difference(gained: int, lost: int, count: int) -> Interval:
    """Return the interval of (gained - lost) / count pairs in points (Bonett and Price, 2012)."""
    up, down = (gained + 1) / (count + 2), (lost + 1) / (count + 2)
    half = Z * math.sqrt((up + down - (up - down) ** 2) / (count + 2))
    return Interval(100 * max(-1.0, up - down - half), 100 * min(1.0, up - down + half))


def mean_of_shares(percents: Sequence[float], counts: Sequence[int]) -> Interval:
    """Return the interval of the mean of shares of different images, from Wilson's of each.

    Distances to the bounds are squared and summed (Zou and Donner, 2008).
    """
    each = [wilson(percent, count) for percent, count in zip(percents, counts, strict=True)]
    mean = sum(percents) / len(percents)
    below, above = (
        math.sqrt(sum((bounds[side] - percent) ** 2 for bounds, percent in zip(each, percents, strict=True)))
        for side in (0, 1)
    )
    return Interval(mean - below / len(percents), mean + above / len(percents))


def near_chance(percent: float, images: float, chance: float) -> bool:
    """Return whether an accuracy is close to that of guessing, both in percent.

    Its interval reaches down to chance, or it is less than 5 points above and below 1.5 times it.
    """
    return wilson(percent, images).low <= chance or (percent - chance < NEAR and percent < NEARLY * chance)


def percentile_interval(values: Numbers) -> Interval:
    """Return the interval that holds the middle 95 % of resamples."""
    low, high = np.quantile(values, (0.025, 0.975))
    return Interval(float(low), float(high))


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """Return the interval of a mean over clients: they are drawn again, with replacement."""
    drawn = np.random.default_rng(SEED).choice(np.asarray(values, float), (RESAMPLES, len(values)))
    return percentile_interval(drawn.mean(axis=1))


def bootstrap_macro(confusion: NDArray[np.int64]) -> dict[str, Interval]:
    """Return intervals of macro precision, recall and F1: the test images are drawn again."""
    classes, images = len(confusion), int(confusion.sum())
    rows, columns = np.nonzero(confusion)  # an image is one of these pairs of a true and a predicted class
    shares = confusion[rows, columns] / images
    found: dict[str, list[NDArray[np.float64]]] = {"macro_precision": [], "macro_recall": [], "macro_f1": []}
    generator = np.random.default_rng(SEED)
    resamples = max(MIN_RESAMPLES, min(RESAMPLES, MAX_DRAWS // len(rows)))
    for first in range(0, resamples, MIN_RESAMPLES):
        counts = generator.multinomial(images, shares, min(MIN_RESAMPLES, resamples - first))
        hits, support, predicted = (
            _sums(weights, at, classes)
            for at, weights in ((rows, counts * (rows == columns)), (rows, counts), (columns, counts))
        )
        occurring = ((support + predicted) > 0).sum(axis=1)
        for name, above, below in (
            ("macro_precision", hits, predicted),
            ("macro_recall", hits, support),
            ("macro_f1", 2 * hits, support + predicted),
        ):
            ratios = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
            found[name].append(100 * ratios.sum(axis=1) / occurring)
    return {name: percentile_interval(np.concatenate(values)) for name, values in found.items()}


def _sums(counts: NDArray[np.int64], at: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """Return the sums over the columns of each class in every row."""
    places = np.arange(len(counts))[:, None] * classes + at
    found: NDArray[Any] = np.bincount(places.ravel(), counts.ravel(), minlength=len(counts) * classes)
    return found.reshape(len(counts), classes)


def bootstrap_figures(images: Sequence[int], figures: Callable[..., Mapping[str, float]]) -> dict[str, Interval]:
    """Return intervals of figures of several sets of images, each of which is drawn again.

    ``figures`` takes the rows that were drawn of each set.
    """
    generator = np.random.default_rng(SEED)
    found: dict[str, list[float]] = {}
    for _ in range(max(MIN_RESAMPLES, min(RESAMPLES, MAX_DRAWS // sum(images)))):
        for name, value in figures(*(generator.integers(0, count, count) for count in images)).items():
            found.setdefault(name, []).append(value)
    return {name: percentile_interval(np.array(values)) for name, values in found.items()}


def bootstrap_seeds(
    runs: Sequence[Mapping[str, float]],
    drawn: Callable[[np.random.Generator], Sequence[Mapping[str, float]]],
    images: int,
) -> dict[str, Interval]:
    """Return intervals of the mean percentages of runs: seeds are drawn again, then their images.

    ``drawn`` returns the figures of all runs with so many images drawn again. A few seeds that are
    drawn again spread less than as many new ones would; this is made good by n / (n - 1).
    """
    generator, count = np.random.default_rng(SEED), len(runs)
    known = np.array([list(run.values()) for run in runs])
    mean, wider = known.mean(0), math.sqrt(count / max(1, count - 1))
    found = []
    for _ in range(max(MIN_RESAMPLES, min(RESAMPLES, MAX_DRAWS // max(1, images)))):
        seeds = generator.integers(0, count, count)
        again = np.array([list(run.values()) for run in drawn(generator)])
        found.append(mean + wider * (known[seeds].mean(0) - mean) + (again - known)[seeds].mean(0))
    bounds = (percentile_interval(np.clip(values, 0, 100)) for values in np.array(found).T)
    return dict(zip(runs[0], bounds, strict=True))


def bootstrap_right(runs: Sequence[str]) -> Interval:
    """Return the interval of a mean accuracy over seeds, on the same test images.

    A text has one letter for each test image: 1 right, 0 wrong.
    """
    right = np.array([[letter == "1" for letter in run] for run in runs], float)

    def drawn(generator: np.random.Generator) -> list[dict[str, float]]:
        chosen = generator.integers(0, right.shape[1], right.shape[1])
        return [{"accuracy": 100 * float(run[chosen].mean())} for run in right]

    told = [{"accuracy": 100 * float(run.mean())} for run in right]
    return bootstrap_seeds(told, drawn, right.size)["accuracy"]


def bootstrap_clients(runs: Sequence[tuple[Sequence[float], Sequence[int]]]) -> Interval:
    """Return the interval over seeds of a mean over clients, of their percentages and images.

    The images of each client are drawn again: what is right of them is binomial.
    """
    shares = [(np.array(percents) / 100, np.array(counts)) for percents, counts in runs]

    def drawn(generator: np.random.Generator) -> list[dict[str, float]]:
        return [{"accuracy": 100 * float((generator.binomial(n, p) / n).mean())} for p, n in shares]

    told = [{"accuracy": 100 * float(p.mean())} for p, _ in shares]
    return bootstrap_seeds(told, drawn, sum(len(p) for p, _ in shares))["accuracy"]


def mcnemar(first: str, second: str) -> Paired | None:
    """Test exactly whether one of two models is right more often, on images that both were asked.

    A text has one letter for each test image: 1 right, 0 wrong, - not asked.
    """
    pairs = [(one, other) for one, other in zip(first, second, strict=True) if "-" not in (one, other)]
    if not pairs:
        return None
    return mcnemar_of_counts(pairs.count(("0", "1")), pairs.count(("1", "0")), len(pairs))


def mcnemar_of_counts(gained: int, lost: int, count: int) -> Paired:
    """Test the same of ``count`` images, by those that only one of the models has right."""
    p = min(1.0, 2 * fair_tail(min(gained, lost), gained + lost))
    return Paired(count, gained, lost, 100 * (gained - lost) / count, paired_difference(gained, lost, count), p)


def fair_tail(most: int, count: int) -> float:
    """Return the chance of at most this many heads, half of ``count`` or fewer, of a fair coin.

    The largest term, times the sum of all in units of it. SciPy's function takes longer to import.
    """
    heads = np.arange(most, 0, -1)
    logarithm = math.lgamma(count + 1) - math.lgamma(most + 1) - math.lgamma(count - most + 1) - count * math.log(2)
    return math.exp(logarithm) * (1 + float(np.cumprod(heads / (count + 1 - heads)).sum()))


def delong(truth: NDArray[np.bool_], first: NDArray[np.float64], second: NDArray[np.float64]) -> Areas:
    """Compare the areas under the ROC curves of two scores of the same images (DeLong, 1988).

    Two images at least must be of the class, and two of others.
    """
    of_class = [below(scores[~truth], scores[truth]) for scores in (first, second)]
    of_others = [1 - below(scores[truth], scores[~truth]) for scores in (first, second)]
    one, other = (float(shares.mean()) for shares in of_class)
    variance = sum(float(np.var(two - before, ddof=1)) / len(before) for before, two in (of_class, of_others))
    if variance == 0:
        return Areas(one, other, Interval(other - one, other - one), 1.0 if one == other else 0.0)
    error = math.sqrt(variance)
    bounds = Interval(max(-1.0, other - one - Z * error), min(1.0, other - one + Z * error))
    return Areas(one, other, bounds, math.erfc(abs(other - one) / error / math.sqrt(2)))


def below(scores: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of scores below each value; equal ones count half."""
    ordered = np.sort(scores)
    places = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    found: NDArray[np.float64] = places / (2 * len(scores))
    return found


def bootstrap_lead(first: Sequence[str], second: Sequence[str]) -> Interval:
    """Return the interval of the mean lead of the first over the second, over seeds and images.

    The texts of both are of the same seeds, in the same order, and of the same images. The images
    are drawn again, each with its predictions of all seeds. The part of the seeds is Student's t of
    the leads of each, for resampling two or three seeds understates how new ones would differ.
    One seed says nothing about others: its interval is over the images alone.
    """
    ours, theirs = (np.array([[letter == "1" for letter in run] for run in runs], float) for runs in (first, second))
    leads = 100 * (ours - theirs)
    generator = np.random.default_rng(SEED)
    images = leads.mean(0)[generator.integers(0, leads.shape[1], (RESAMPLES, leads.shape[1]))].mean(1)
    return percentile_interval(images + new_seeds(leads.mean(1), generator))


def bootstrap_lead_of_clients(
    first: Sequence[tuple[Sequence[float], Sequence[int]]], second: Sequence[tuple[Sequence[float], Sequence[int]]]
) -> Interval:
    """Return the same for means over clients: the images of each client are drawn for both anew."""
    generator = np.random.default_rng(SEED)
    known, drawn = (np.zeros(len(first)), np.zeros((RESAMPLES, len(first))))
    for sign, runs in ((1, first), (-1, second)):
        for seed, (percents, counts) in enumerate(runs):
            shares, images = np.array(percents) / 100, np.array(counts)
            again = generator.binomial(images, shares, (RESAMPLES, len(images))) / images
            known[seed] += sign * 100 * shares.mean()
            drawn[:, seed] += sign * 100 * again.mean(1)
    return percentile_interval(drawn.mean(1) + new_seeds(known, generator))


def new_seeds(leads: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Draw the distance of the mean lead of new seeds from that of these; 0 for one seed."""
    count = len(leads)
    if count < 2:
        return np.zeros(RESAMPLES)
    drawn: NDArray[np.float64] = generator.standard_t(count - 1, RESAMPLES) * leads.std(ddof=1) / math.sqrt(count)
    return drawn


def bootstrap(measure: Callable[[np.random.Generator], float]) -> Interval:
    """Return the interval of a measure that draws its clients or images anew each time."""
    from fedvl.seeding import numpy_generator  # imports torch, which the intervals of reports do not need

    generator = numpy_generator(SEED, "bootstrap")
    low, high = np.nanquantile([measure(generator) for _ in range(FEWER)], (0.025, 0.975))
    return Interval(float(low), float(high))


def mean_of(values: Numbers) -> tuple[float, Interval]:
    """Return the mean over images, and its interval."""
    return float(values.mean()), bootstrap(lambda generator: float(generator.choice(values, len(values)).mean()))


def mean_of_few(values: Numbers, bounds: tuple[float, float] = (-1.0, 1.0)) -> tuple[float, Interval]:
    """Return the mean over clients, and Student's interval, which holds for few of them too."""
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return mean, Interval(*bounds)
    half = student_half(max(float(values.std(ddof=1)), ROUNDED), count)
    return mean, Interval(max(mean - half, bounds[0]), min(mean + half, bounds[1]))


def student_half(deviation: Spread, count: int) -> Spread:
    """Return half the width of Student's interval of a mean of ``count`` values."""
    from scipy.special import stdtrit  # Student's quantile; scipy.stats takes half a second to import

    half: Spread = float(stdtrit(count - 1, 0.975)) * deviation / count**0.5
    return half


def paired_p(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return p of a paired t-test over seeds; None for fewer than three, or if all differ alike."""
    from scipy.stats import ttest_rel

    differences = np.array(ours) - np.array(theirs)
    if len(differences) < MIN_PAIRED or float(differences.std()) < 1e-12:
        return None
    return float(ttest_rel(ours, theirs).pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values of several tests with Holm's correction, in the same order."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted


def share_of(right: float, total: int) -> tuple[float, Interval]:
    """Return a share of so many trials, and its interval."""
    return right / total, proportion(round(right), total)


def correlation(left: Numbers, right: Numbers) -> float:
    """Return Pearson's r; 0 where one side is constant and so says nothing."""
    left, right = left - left.mean(), right - right.mean()
    size = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(left @ right) / size if size > 1e-12 else 0.0


def of_correlation(value: float, count: int) -> Interval:
    """Return Fisher's interval of a correlation over clients."""
    if count <= 3:
        return Interval(-1.0, 1.0)
    centre, half = math.atanh(min(max(value, -0.9999), 0.9999)), Z / math.sqrt(count - 3)
    return Interval(math.tanh(centre - half), math.tanh(centre + half))


def auc(inside: Numbers, outside: Numbers, weights: Numbers) -> float:
    """Return the chance that a record from inside scores above a weighted one from outside."""
    if not (len(inside) and weights.any()):
        return float("nan")
    order = np.argsort(outside)
    below = np.concatenate([[0.0], np.cumsum(weights[order])])
    left, right = (np.searchsorted(outside[order], inside, side=side) for side in ("left", "right"))
    return float((below[left] + below[right]).mean() / (2 * below[-1]))


def hits_at(inside: Numbers, outside: Numbers, weights: Numbers, false_alarms: float) -> float:
    """Return the share of records found at a threshold that few outside pass (TPR at an FPR)."""
    if not (len(inside) and weights.any()):
        return float("nan")
    order = np.argsort(-outside)
    passed = np.cumsum(weights[order]) / weights.sum()
    threshold = outside[order][np.searchsorted(passed, false_alarms)]
    return float((inside > threshold).mean())
