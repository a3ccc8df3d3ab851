"""Forms of the papers' methods that need sums alone, with every client a party of its own: the bits of the local engine."""

from importlib.util import find_spec

import pytest
import torch
from helpers.small import run_quietly

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import CLIENTS, local_federation, remote_federation, same

from fedvl.config import PrivacyConfig
from fedvl.errors import FedVLError

SECURE = {"secure_sum": True, "least_clients": 4, "rounds": 2, "training": {"local_epochs": 1}}
HIDDEN = PrivacyConfig(unit="client", epsilon=20.0, clip=0.1)
FORMS = {
    "fed-mp": {"merging": "summed"},
    "fed-prime": {"matching": "client"},
    "fedpp": {"counts": "shares", "visual_prompts": False},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("privacy", [None, HIDDEN])
def test_a_server_that_learns_sums_alone_ends_with_the_bits_of_the_local_engine(name, privacy, tmp_path):
    settings = {**SECURE, "privacy": privacy}
    remote, grid = remote_federation(name, tmp_path, options=FORMS[name], **settings)
    local = run_quietly(local_federation(name, FORMS[name], **settings))
    assert same(run_quietly(remote), local)
    for client, private in local.engine.private.items():
        assert private.keys() == grid.parties[client].engine.private[client].keys()
        for key, tensor in private.items():
            assert torch.equal(grid.parties[client].engine.private[client][key], tensor)


def test_parties_add_their_shares_of_the_noise_also_without_images(tmp_path):
    """The server opens the sum of the reports: it differs from the true totals by the noise of all five parties."""
    settings = {**SECURE, "rounds": 1, "least_clients": CLIENTS, "privacy": HIDDEN}
    remote, _ = remote_federation("fedpp", tmp_path, options=FORMS["fedpp"], **settings)
    local = local_federation("fedpp", FORMS["fedpp"], **settings)
    true = sum(report.tensors["counts"] for report in local.engine.reports(0, {})[0])
    opened = remote.engine.report(0, {})[0][0].tensors["counts"]
    hidden = local.engine.shared_noise
    shares = [hidden.share_of_counts(4, 0, 0, client) for client in range(CLIENTS)]  # a rehearsal draws by the seed
    assert torch.equal(opened - true, torch.stack(shares).sum(0).float())
    assert all(share.any() for share in shares)


def test_between_machines_noise_on_reports_needs_a_secure_sum(tmp_path):
    remote, _ = remote_federation("fedpp", tmp_path, options=FORMS["fedpp"], privacy=HIDDEN, rounds=1)
    with pytest.raises(FedVLError, match="use --secure-sum"):
        run_quietly(remote)
