"""Fed-Intra: Fed-PRIME with the intra-client pool only, averaged or local; an ablation."""

from fedvl.methods.fed_prime import FedPrime


class FedIntra(FedPrime):
    pools = ("intra",)
