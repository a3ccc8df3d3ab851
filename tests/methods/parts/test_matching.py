"""The alignment of clients' prompts: planted clusters are found again, whoever comes first."""

import pytest
import torch

from fedvl.methods.parts.matching import (
    Network,
    align,
    cosine_threshold,
    fit,
    group_prompts,
    log_density,
    nearest,
    reassign,
)

TRUTH = 5


def planted(clients=6, width=16, noise=0.2, scale=1.0, seed=0):
    """Each client's noisy prompts in an order of its own, and which true prompt each of them is."""
    generator = torch.Generator().manual_seed(seed)
    truth = scale * torch.randn(TRUTH, width, generator=generator)
    orders = [torch.randperm(TRUTH, generator=generator) for _ in range(clients)]
    return [truth[o] + scale * noise * torch.randn(TRUTH, width, generator=generator) for o in orders], orders


def likelihood(pools):
    return align(pools, torch.Generator().manual_seed(0))


both = pytest.mark.parametrize("match", [group_prompts, likelihood])


def pairs(clusters):
    """Which two prompts are in one cluster: what clusters are, but for their names."""
    numbers = torch.cat(clusters)
    return numbers[:, None] == numbers


@both
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(("clients", "width"), [(2, 16), (6, 16), (20, 768)])
def test_shuffled_noisy_prompts_are_aligned_again(match, clients, width, scale):
    pools, orders = planted(clients, width, scale=scale)
    found = match(pools)
    assert torch.equal(pairs(found.clusters), pairs(orders))
    assert found.sizes.tolist() == [clients] * TRUTH
    for prompt in range(TRUTH):
        copies = torch.stack([pool[order == prompt][0] for pool, order in zip(pools, orders, strict=True)])
        cluster = found.clusters[0][orders[0] == prompt]
        torch.testing.assert_close(found.centroids[cluster][0], copies.mean(0), rtol=1e-5, atol=1e-6 * scale)


@both
def test_prompts_that_only_some_clients_have_make_smaller_clusters(match):
    pools, orders = planted()
    kept = [slice(None), slice(0, 3), slice(2, 4), slice(0, 0), slice(4, 5), slice(0, 5)]
    pools, orders = ([item[k] for item, k in zip(items, kept, strict=True)] for items in (pools, orders))
    stranger = -3 * torch.ones(1, 16)
    found = match([*pools, stranger])
    assert torch.equal(pairs(found.clusters), pairs([*orders, torch.tensor([TRUTH])]))
    assert found.clusters[3].shape == (0,)  # a client without prompts takes part in nothing
    assert sorted(found.sizes.tolist()) == sorted(torch.bincount(torch.cat([*orders, torch.tensor([5])])).tolist())


@both
def test_permuting_clients_or_their_prompts_changes_nothing(match):
    pools, _ = planted(noise=0.6)  # hard enough that the order of visits could matter
    found = match(pools)
    clients = [3, 0, 5, 1, 4, 2]
    generator = torch.Generator().manual_seed(9)
    orders = [torch.randperm(TRUTH, generator=generator) for _ in pools]
    shuffled = match([pools[client][order] for client, order in zip(clients, orders, strict=True)])
    assert torch.equal(shuffled.centroids, found.centroids)
    assert torch.equal(shuffled.sizes, found.sizes)
    for client, order, clusters in zip(clients, orders, shuffled.clusters, strict=True):
        assert torch.equal(clusters, found.clusters[client][order])


@pytest.mark.parametrize("noise", [0.5, 0.8, 1.0, 1.5])
def test_copies_with_as_much_noise_as_prompts_are_grouped_without_a_wrong_pair(noise):
    generator = torch.Generator().manual_seed(1)
    truth = 0.02 * torch.randn(20, 320, generator=generator)
    orders = [torch.randperm(20, generator=generator) for _ in range(20)]
    found = group_prompts([truth[o] + 0.02 * noise * torch.randn(20, 320, generator=generator) for o in orders])
    assert len(found.centroids) == 20
    assert torch.equal(pairs(found.clusters), pairs(orders))


def test_the_most_similar_pair_is_joined_first():
    """Client 1's prompt is a copy of either of client 0's, which differ: it goes to the nearer one."""
    base = torch.eye(64)
    pool = torch.stack([base[0] + 0.3 * base[1], base[0] + 0.3 * base[2]])
    others = [base[3:5], base[5:7]]
    found = group_prompts([pool, (base[0] + 0.2 * base[2])[None], *others])
    assert found.clusters[1][0] == found.clusters[0][1]
    assert len(found.centroids) == 6


def test_the_threshold_is_that_of_random_directions():
    assert cosine_threshold(320) == pytest.approx(0.22, abs=0.003)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.nn.functional.normalize(torch.randn(1000, 320, generator=generator), dim=-1)
    above = (drawn @ drawn.T > cosine_threshold(320)).triu(1).sum()
    assert above < 50  # of 499,500 pairs


@both
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_unrelated_prompts_stay_apart(match, scale):
    unrelated = scale * torch.randn(4, 3, 256, generator=torch.Generator().manual_seed(0))
    assert len(match(list(unrelated)).centroids) == 12


def test_a_prompt_is_not_explained_by_its_own_centroid():
    """Two clients of one prompt, each alone with its centroid: that fits best, but only for itself, and so they meet."""
    x, benefit = torch.tensor([[1.0], [1.1]]), torch.tensor([[5.0, 1.0], [1.0, 5.0]]).double()
    met = reassign(x, benefit, torch.zeros(2), [torch.tensor([0]), torch.tensor([1])], torch.tensor([0, 1]))
    assert met.tolist() == [1, 1]
    far = torch.tensor([[5.0, -2.0], [-2.0, 5.0]]).double()  # worse than N(0, 1) explains either
    apart = reassign(x, far, torch.zeros(2), [torch.tensor([0]), torch.tensor([1])], torch.tensor([0, 1]))
    assert apart.tolist() == [0, 1]


@both
def test_prompts_of_one_client_never_share_a_cluster(match):
    generator = torch.Generator().manual_seed(0)
    twins = torch.randn(1, 16, generator=generator).expand(2, -1) + 1e-3 * torch.randn(2, 16, generator=generator)
    other = torch.randn(1, 16, generator=generator)
    found = match([torch.cat([twins, other]), twins[:1] + 1e-3])
    assert len(found.clusters[0].unique()) == 3
    assert found.clusters[1][0] in found.clusters[0][:2]


@both
def test_equal_prompts_and_a_single_client(match):
    same = torch.full((1, 8), 0.5)
    assert match([same, same, same]).sizes.tolist() == [3.0]
    torch.testing.assert_close(match([same, same]).centroids, same)
    pool = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    alone = match([pool])
    torch.testing.assert_close(alone.centroids[alone.clusters[0]], pool)


def test_log_density_is_that_of_the_normal_distribution():
    generator = torch.Generator().manual_seed(0)
    x, centroids = torch.randn(5, 6, generator=generator), torch.randn(3, 6, generator=generator)
    log_sd = torch.randn(3, 6, generator=generator) - 1
    normal = torch.distributions.Normal(centroids, log_sd.exp())
    expected = normal.log_prob(x[:, None]).sum(-1) + 3 * torch.log(torch.tensor(2 * torch.pi))
    torch.testing.assert_close(log_density(x, centroids, log_sd).float(), expected, rtol=1e-5, atol=1e-4)


def test_fit_sets_means_and_leaves_empty_centroids_with_their_founders():
    x = torch.tensor([[0.0, 2.0], [2.0, 0.0], [5.0, 5.0], [1.0, 1.0]])
    generator = torch.Generator().manual_seed(0)
    spread, popularity = Network(2, 2, generator), Network(2, 1, generator)
    before = [network(x).detach() for network in (spread, popularity)]
    centroids = fit(x, torch.tensor([1, 1, 2, 2]), 2, spread, popularity)
    assert centroids.tolist() == [[0.0, 2.0], [1.0, 1.0], [3.0, 3.0], [1.0, 1.0]]
    assert (popularity(centroids[1:3]) > before[1][1:3]).all()  # both clients use both
    assert not torch.equal(spread(x), before[0])


def test_a_network_steps_as_adam_does():
    network = Network(3, 2, torch.Generator().manual_seed(0))
    copies = [tensor.detach().clone().requires_grad_() for tensor in network.parameters]
    adam = torch.optim.Adam(copies, lr=1e-3)
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        network.step(network(x).pow(2).sum())
        adam.zero_grad()
        hidden = torch.relu(torch.nn.functional.linear(x, copies[0], copies[1]))
        torch.nn.functional.linear(hidden, copies[2], copies[3]).pow(2).sum().backward()
        adam.step()
    for ours, theirs in zip(network.parameters, copies, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_alignment_runs_on_one_thread_and_leaves_the_number_as_it_was(monkeypatch):
    before, seen = torch.get_num_threads(), []

    def watched(*given):
        seen.append(torch.get_num_threads())
        return fit(*given)

    monkeypatch.setattr("fedvl.methods.parts.matching.fit", watched)
    torch.set_num_threads(2)
    try:
        align([torch.eye(4), torch.eye(4)], torch.Generator().manual_seed(0))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_prompts_take_different_places_at_the_least_distance_together():
    """The second prompt is nearest to place 0 too, but the first would then have to go farther."""
    pool = torch.tensor([[0.0], [3.0], [9.0]])
    assert nearest(torch.tensor([[0.1], [1.4]]), pool).tolist() == [0, 1]
    assert nearest(torch.tensor([[9.5]]), pool).tolist() == [2]
    assert nearest(torch.zeros(0, 1), pool).tolist() == []
