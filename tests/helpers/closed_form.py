"""Small finished runs of ridge, whose models follow from sums."""

from fedvl.display import Silent
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.tensors import load
from helpers.runs import OPENER


def settings(**federation):
    return {
        "method": {"name": "ridge"},
        "data": {"shots": 12, "clients": 5, "minimum": 0},
        "federation": {"threads": 1, **federation},
    }


def finished(path, experiment, known=None):
    path.mkdir()
    folder = RunFolder(path)
    folder.describe(experiment)
    complete(folder, Silent(), OPENER, known=known)
    return folder


def largest_difference(one, two):
    tensors, others = (load(folder.file("model.safetensors")) for folder in (one, two))
    assert tensors.keys() == others.keys()
    return max(float((tensors[name] - others[name]).abs().max()) for name in tensors)
