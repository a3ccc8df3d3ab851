"""Differential privacy of statistics: Gaussian noise, once in each exchange of sums.

Who adds it follows from who learns what. Under secure aggregation each client adds a share, and any
``least_clients`` of them add the whole noise. Without it each client adds the whole noise to its
own statistics (record level), or the server, which is trusted then, adds it to the sum (client
level).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedvl.config import Experiment, FederationConfig, PrivacyConfig
from fedvl.errors import FedVLError
from fedvl.federation.accounting import Account, Step, epsilon_of, sigma_for
from fedvl.federation.fixed_point import rounding_error
from fedvl.federation.privacy import noise_for, stop_before
from fedvl.federation.records import Budget
from fedvl.methods.base import Method, SumNoise
from fedvl.methods.roles import Statistic
from fedvl.tensors import Tensors

SAMPLING = "every client in every exchange"


def noise_shares(federation: FederationConfig) -> int:
    """Return how many clients add the whole noise together."""
    return federation.least_clients if federation.secure_sum else 1


def sum_noise(experiment: Experiment, images: int) -> SumNoise:
    """Return the noise on a sum over all clients, given how many images they have, about."""
    privacy, federation = experiment.privacy, experiment.federation
    clients = experiment.data.clients - len(experiment.absent)
    by_clients = federation.secure_sum or privacy.unit == "record"
    added = clients / noise_shares(federation) if by_clients else 1.0
    sigma = sigma_for(privacy.epsilon, 1.0, federation.rounds, privacy.delta)
    clip = (privacy.clip or images / clients) if privacy.unit == "client" else None
    return SumNoise(sigma * math.sqrt(added), images, clip)


@dataclass(frozen=True)
class StatisticsPrivacy:
    """Hide each client, or each image, in the sums of statistics."""

    config: PrivacyConfig
    exchanges: int
    shares: int
    sensitivity: float  # how far one unit moves a sum
    by_server: bool = False  # whether the server adds the noise
    seed: int = 0  # of the server's noise

    @cached_property
    def sigma(self) -> float:
        """The noise multiplier of an exchange, so that all of them together spend epsilon."""
        return sigma_for(self.config.epsilon, 1.0, self.exchanges, self.config.delta)

    @property
    def account(self) -> Account:
        return "pld"

    def step_of(self, kind: str) -> Step | None:
        return Step(1.0, self.sigma) if kind == "train" else None

    def spend(self, before: Sequence[Budget], sizes: Sequence[int]) -> Budget:
        """Return the budget after another exchange, for its record; refuse one too many."""
        step = Step(1.0, self.sigma)
        epsilon = epsilon_of({step: len(before) + 1}, self.config.delta)
        stop_before(epsilon, self.config.epsilon, len(before) + 1)
        return Budget(
            unit="record" if self.config.unit == "record" else "client",
            epsilon=epsilon,
            delta=self.config.delta,
            sampling=SAMPLING,
            **step._asdict(),
        )

    @property
    def clip(self) -> float | None:
        """The norm to which a client's statistics are clipped, if clients are hidden."""
        return self.sensitivity if self.config.unit == "client" else None

    def noised(self, statistics: Tensors, seed: int, *purpose: str | int) -> Tensors:
        """Add the whole noise, or a client's share; rounding to whole numbers is covered."""
        covered = self.sensitivity + 2 * rounding_error(statistics)
        noise = noise_for(statistics, self.sigma * covered / math.sqrt(self.shares), seed, "statistics", *purpose)
        return {name: tensor + noise[name] for name, tensor in statistics.items()}


def statistics_privacy(
    method: Method, privacy: PrivacyConfig, federation: FederationConfig, seed: int = 0
) -> StatisticsPrivacy | None:
    """Return the noise on a method's statistics, if it has some and there is to be noise."""
    if privacy.unit == "none" or not method.role.statistics:
        return None
    noise = method.task.noise
    assert noise is not None, "preparation sets it"
    sensitivity = noise.clip or sensitivity_of(method.role.statistics.values())
    by_server = privacy.unit == "client" and not federation.secure_sum
    return StatisticsPrivacy(privacy, federation.rounds, noise_shares(federation), sensitivity, by_server, seed)


def sensitivity_of(statistics: Iterable[Statistic]) -> float:
    """Return how far one sample moves all sums together, at most."""
    norms = [role.norm for role in statistics]
    if None in norms:
        raise FedVLError("Noise cannot cover statistics of unlimited norm; leave --privacy out.")
    return math.hypot(*(norm for norm in norms if norm is not None))
