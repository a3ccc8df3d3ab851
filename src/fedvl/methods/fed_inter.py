"""Fed-Inter: Fed-PRIME with the inter-client pool only, which the server aligns; an ablation."""

from fedvl.methods.fed_prime import FedPrime


class FedInter(FedPrime):
    pools = ("inter",)
