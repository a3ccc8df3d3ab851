"""Fed-Intra: Fed-PRIME with its intra-client pool alone, averaged or each client's own; an ablation of its paper."""

from fedvl.methods.fed_prime import FedPrime


class FedIntra(FedPrime):
    pools = ("intra",)
