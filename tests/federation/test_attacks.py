"""Simulated hostile clients: what they send, and what it does to a run with and without a rule."""

import pytest
import torch
from helpers.runs import prepare, run, run_experiment
from helpers.small import run_quietly, small_federation, small_method
from torch.nn.functional import cosine_similarity, normalize

from fedvl.config import FederationConfig
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.attacks import (
    TARGET,
    Attack,
    adaptive,
    alie,
    attacked,
    flipped,
    ipm,
    overstated,
    poisoned,
    scaled,
    sign_flip,
    triggered,
)
from fedvl.federation.round import Federation
from fedvl.federation.stacks import Trained
from fedvl.methods.base import Samples, Update
from fedvl.methods.roles import Roles
from fedvl.runs.requirements import RULE_BETWEEN_MACHINES
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator


def test_what_is_written_is_read():
    assert Attack.parse("scaled:0.2") == Attack("scaled", 0.2)
    for text in ("scaled", "scaled:", "scaled:2", "scaled:0", "other:0.2", "scaled:x", ""):
        with pytest.raises(FedVLError, match=r"KIND:SHARE, such as scaled:0\.2"):
            Attack.parse(text)


def test_the_hostile_are_a_share_of_the_clients_drawn_from_the_seed():
    attack = Attack("scaled", 0.25)
    assert len(attack.clients(20, 0)) == 5
    assert attack.clients(20, 0) == attack.clients(20, 0) != attack.clients(20, 1)


def test_moves_by_hand():
    moves = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    assert sign_flip(moves, 10).tolist() == [[-1, -2], [-3, -2]]
    assert scaled(moves, 10).tolist() == [[-10, -20], [-30, -20]]
    assert ipm(moves, 10).tolist() == [[-1, -1], [-1, -1]]
    # of ten, two hostile: 4 of the 8 honest are needed for a majority, so that half may be farther: 0 deviations
    assert alie(moves, 10).tolist() == [[2, 2], [2, 2]]
    # four of ten hostile: 2 of 6 needed; the normal quantile of 4/6 is 0.4307
    assert alie(torch.cat([moves, moves]), 10)[0].tolist() == pytest.approx([2 - 0.4307, 2], abs=1e-4)


def test_labels_are_reversed_where_they_are_hostile():
    labels = torch.tensor([0, 1, 2, -1, 2])
    assert flipped(labels, torch.tensor([1, 2, 3]), 3).tolist() == [0, 1, 0, -1, 2]
    assert labels.tolist() == [0, 1, 2, -1, 2]


def test_a_trigger_is_a_white_corner_or_a_shift_of_the_same_length():
    pixels = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    stamped = triggered({"pixels": pixels}, 0)["pixels"]
    assert stamped.sum() == 2 * 3 * 4 * 255  # an eighth of the side: 2 x 2 pixels
    assert bool((stamped[..., -2:, -2:] == 255).all())
    assert pixels.sum() == 0
    direction = torch.randn(3, generator=torch_generator(0, "trigger"))
    across = 5 * normalize(torch.linalg.cross(direction, torch.tensor([1.0, 0.0, 0.0])), dim=0)
    moved = triggered({"embeddings": across[None]}, 0)["embeddings"][0]
    # two sides of 5 and 2.5 at a right angle, brought back to a length of 5
    assert float(moved.norm()) == pytest.approx(5)
    assert float(cosine_similarity(moved, across, dim=0)) == pytest.approx(2 / 5**0.5)
    assert float(cosine_similarity(moved, direction, dim=0)) == pytest.approx(1 / 5**0.5)


def test_a_backdoor_is_in_every_second_image_of_the_hostile():
    samples = Samples({"features": torch.eye(4)}, torch.tensor([1, 2, 3, 1]))
    changed = poisoned("backdoor", samples, torch.tensor([1, 2, 3]), 4, seed=0)
    assert changed.labels.tolist() == [1, TARGET, 3, TARGET]
    same = [bool(torch.equal(one, other)) for one, other in zip(changed.inputs["features"], torch.eye(4), strict=True)]
    assert same == [True, False, True, False]
    assert samples.labels.tolist() == [1, 2, 3, 1]
    assert torch.equal(samples.inputs["features"], torch.eye(4))
    assert poisoned("scaled", samples, torch.tensor([1]), 4, seed=0) is samples


def test_a_backdoor_opens_under_the_mean_and_hardly_under_a_root(tmp_path):
    def result(name, **federation):
        settings = {"method": {"name": "linear"}, "data": {"clients": 20, "partition": "dirichlet:0.1"}}
        settings["evaluation"] = {"every": 10}
        experiment = resolve_experiment({**settings, "federation": {"rounds": 10, "threads": 1, **federation}})
        (tmp_path / name).mkdir()
        return run_experiment(experiment, tmp_path / name, Silent())

    attacked = result("mean", attack="backdoor:0.2")
    defended = result("root", attack="backdoor:0.2", robust="root")
    assert attacked.backdoor_success > 70
    assert attacked.backdoor_images == 900  # of 1,000, those that are not of the target's class
    assert defended.backdoor_success < 30
    assert min(attacked.accuracy, defended.accuracy) > 60
    assert "backdoor_success" not in result("none", rounds=1)


def test_a_backdoor_needs_labels_and_a_class_that_is_queried():
    with pytest.raises(FedVLError, match="trains without labels"):
        prepare({"method": {"name": "fst-cbdg"}, "federation": {"attack": "backdoor:0.2"}})
    open_set = {"data": {"clients": 3}, "evaluation": {"protocol": "open"}}
    with pytest.raises(FedVLError, match="for a class that is queried"):
        prepare({"method": {"name": "fedclip"}, "federation": {"attack": "backdoor:0.2"}, **open_set})


def test_only_the_hostile_lie_and_whole_numbers_stay():
    shared = {"w": torch.zeros(2), "count": torch.tensor(3)}
    trained = [
        Trained(Update(client, {"w": torch.full((2,), 1.0 + client), "count": torch.tensor(4)}, 1.0), {}, 0.0, 1)
        for client in range(3)
    ]
    sent = attacked(Attack("sign-flip", 0.4), [1], shared, trained)
    assert [result.update.tensors["w"].tolist() for result in sent] == [[1, 1], [-2, -2], [3, 3]]
    assert all(result.update.tensors["count"].item() == 4 for result in sent)
    assert trained[1].update.tensors["w"].tolist() == [2, 2]


def ten_results(examples=5):
    """Nine clients move one number by 1; the last is hostile."""
    return [
        Trained(Update(client, {"w": torch.tensor([1.0, 0.0])}, float(examples)), {}, 0.0, examples)
        for client in range(10)
    ]


def test_the_adaptive_attack_stays_just_below_the_limits():
    shared, role = {"w": torch.zeros(2)}, Roles({})

    def lie(**limits):
        sent = adaptive([9], shared, ten_results(), role, FederationConfig(**limits))
        assert all(result.update.tensors["w"].tolist() == [1, 0] for result in sent[:9])
        return sent[9].update.tensors["w"].tolist()

    # the usual move is 1, and max_norm_ratio times that is let through
    assert lie() == pytest.approx([-0.99 * 6, 0])
    assert lie(max_norm_ratio=2) == pytest.approx([-0.99 * 2, 0])
    assert lie(max_update_norm=1.5) == pytest.approx([-0.99 * 1.5, 0])
    assert lie(secure_sum=True, max_update_norm=50) == pytest.approx([-0.99 * 50, 0])
    # a median is moved by nobody alone: the first length that is tried is as good as any
    assert lie(robust="median") == pytest.approx([-0.5, 0])
    alone = adaptive([0], shared, ten_results()[:1], role, FederationConfig())
    assert alone[0].update.tensors["w"].tolist() == [1, 0]  # nobody honest to work against


def test_an_overstating_client_declares_the_most_that_is_let_through():
    limits = FederationConfig(max_examples=1000)
    sent = overstated([9], ten_results(), False, limits)
    assert [(result.examples, result.update.weight) for result in sent] == [(5, 5.0)] * 9 + [(1000, 1000.0)]
    assert overstated([9], ten_results(), True, limits)[9].update.weight == 1


@pytest.mark.parametrize("attack", ["scaled", "adaptive", "overstated"])
def test_one_client_of_four_ruins_the_mean_and_not_the_rule_of_federations(attack):
    def accuracy(rule):
        settings = {"method": {"name": "linear"}, "data": {"partition": "dirichlet:0.5", "clients": 4}}
        federation = {"rounds": 10, "threads": 1, "robust": rule, "attack": f"{attack}:0.25"}
        return run({**settings, "federation": federation}).accuracy

    assert accuracy("mean") < 30  # 70.1 without an attacker
    assert accuracy(RULE_BETWEEN_MACHINES) > 60


@pytest.mark.parametrize("attack", ["adaptive", "overstated"])
def test_one_client_of_ten_ruins_the_mean_and_not_the_rule_of_federations(attack):
    def accuracy(**federation):
        settings = {"method": {"name": "linear"}, "data": {"partition": "dirichlet:0.5", "clients": 10}}
        finished = run({**settings, "federation": {"rounds": 10, "threads": 1, **federation}})
        assert not any(record.refused for record in finished.federation.records)
        return finished.accuracy

    attacked, clean = {"attack": f"{attack}:0.1"}, accuracy()
    assert accuracy(**attacked) < clean - 40
    assert accuracy(**attacked, robust=RULE_BETWEEN_MACHINES) > clean - 3
    assert accuracy(robust=RULE_BETWEEN_MACHINES) > clean - 1


def test_a_rule_changes_what_is_merged_and_a_root_survives_a_resume(tmp_path):
    from fedvl.federation.journal import Journal
    from fedvl.federation.local import LocalEngine

    def federation(journal=None, **settings):
        found = small_federation(small_method("fst-cbdg"), **settings)
        engine = found.engine
        rows = [torch.cat(list(engine.rows))[:6]]
        root = LocalEngine(found.method, engine.data, rows, engine.training, engine.federation, 0)
        return Federation(found.method, engine, found.config, 0, dict(found.shared), journal=journal, root=root)

    whole = run_quietly(federation(rounds=4, robust="root"))
    mean = run_quietly(small_federation(small_method("fst-cbdg"), rounds=4))
    assert any(not torch.equal(whole.shared[name], mean.shared[name]) for name in whole.shared)
    first = federation(Journal(tmp_path), rounds=2, robust="root")
    run_quietly(first)
    again = federation(Journal(tmp_path), rounds=4, robust="root")
    again.restore()
    run_quietly(again)
    assert all(torch.equal(again.shared[name], whole.shared[name]) for name in whole.shared)


def test_a_rule_has_nothing_to_merge_where_nothing_is_summed():
    finished = run_quietly(small_federation(small_method("fed-mp"), rounds=1, robust="centred-clipping"))
    assert all(bool(tensor.isfinite().all()) for tensor in finished.shared.values())
