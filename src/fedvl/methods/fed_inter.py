"""Fed-Inter: Fed-PRIME with its inter-client pool alone, which the server aligns; an ablation of its paper."""

from fedvl.methods.fed_prime import FedPrime


class FedInter(FedPrime):
    pools = ("inter",)
