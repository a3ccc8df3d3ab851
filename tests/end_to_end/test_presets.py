"""Presets ``released`` against what the released commands resolve to, each number with its place there."""

from typing import Any

import pytest

from fedvl.runs.settings import resolve_experiment

# Dassl: the yaml of trainer and dataset is merged after arguments (--lr, --iters), and overrides them; what the program
# sets after the merge (--train_batch_size, --num_epoch of some) overrides the yaml.
RELEASED: dict[tuple[str, str], dict[str, Any]] = {
    ("pfedmoap", "released"): {
        "training.learning_rate": 0.002,  # LR of configs/trainers/*/rn50.yaml and vit_b16.yaml
        "training.schedule": "cosine",  # LR_SCHEDULER there
        "training.batch_size": 16,  # train.sh --train_batch_size
        "training.local_epochs": 5,  # MAX_EPOCH of the yaml
        "method.gate_rate": 5.0,  # gate 0.01, as a multiple of the rate
        "method.choice": "drawn",  # the option of the nearest is not passed on
    },
    ("promptfolio", "released"): {
        "training.learning_rate": 0.002,
        "training.schedule": "cosine",
        "training.local_epochs": 5,  # MAX_EPOCH of the yaml overrides 1
        "training.batch_size": 16,  # default of --train_batch_size, set after the merge
        "method.theta": 0.4,
        "method.context": 8,
    },
    ("pfedmma", "released"): {
        "training.learning_rate": 0.001,
        "training.batch_size": 32,  # base2new.sh --train_batch_size
        "training.weight_decay": 5e-4,  # OPTIM.WEIGHT_DECAY of Dassl's defaults
        "training.local_epochs": 1,
        "federation.rounds": 100,
    },
    ("fedmvp", "paper"): {
        "training.learning_rate": 0.003,
        "training.schedule": "cosine",  # LR_SCHEDULER of config/defaults.py
        "training.batch_size": 128,
        "federation.rounds": 100,
    },
    ("faa-clip", "released"): {
        "federation.rounds": 2,  # main.py --iters
        "method.both_sides": False,
        "method.loss": "contrastive",
    },
    ("facmic", "released"): {
        "federation.rounds": 50,
        "method.loss": "contrastive",
        "method.lmmd": "released",  # main.py: raw target features in the kernels
        "method.weights": "samples",  # l[i] / (l1 + l2 + l3)
    },
    ("fedpgp", "released"): {
        "training.learning_rate": 0.001,
        "method.frozen": "placeholder",  # "X X ... X NAME."
    },
    ("fedmgp", "released"): {
        "method.diversity": "l1",
        "method.weights": "clients",
        "method.tail": "of a",  # the tokens of "a photo of a" beyond the context
    },
}


@pytest.mark.parametrize(("method", "preset"), RELEASED)
def test_a_preset_resolves_to_what_the_released_command_runs(method: str, preset: str) -> None:
    found = resolve_experiment({"method": {"name": method, "preset": preset}})
    for name, expected in RELEASED[method, preset].items():
        section, key = name.split(".")
        holder = found.method.options if section == "method" else getattr(found, section).model_dump()
        assert holder[key] == expected, name
