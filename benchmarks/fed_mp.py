"""Measure Fed-MP on real images: accuracy with and without its two modules, its weights, its speed.

    python -m benchmarks.fed_mp DATASET... [--seeds 5] [--clients 10] [--shots 8] [--json]
    python -m benchmarks.fed_mp --speed

Open vocabulary: each seed draws new classes for the clients and for the queries, so that the
standard deviation is mostly that of the classes drawn; ``gain`` is the difference to zero-shot on
the same classes. ``examples`` is the share of images that became prototypes, ``right`` the share of
these with the true class. Training happens once for each setting and seed; the ablations predict
from the same run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import normalize

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.evaluation.predict import Conversation
from fedvl.federation.local import LocalEngine
from fedvl.federation.orders import order_of
from fedvl.methods.base import Samples, Task
from fedvl.methods.fed_mp import FedMP, FedMPOptions
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors
from tests.helpers.runs import Finished, norm, run

SAME_STEPS = {
    "optimiser": "adamw",
    "learning_rate": 1e-5,
    "batch_size": 18,
    "local_epochs": 2,
}  # for FedCLIP too, appendix A
TRAININGS: dict[str, dict[str, Any]] = {
    "paper": {"method": {"name": "fed-mp"}},
    "released": {"method": {"name": "fed-mp", "preset": "released"}},
    "paper, rate 1e-3": {"method": {"name": "fed-mp"}, "training": {"learning_rate": 1e-3}},
    "paper, rate 1e-3, 20 rounds": {
        "method": {"name": "fed-mp"},
        "training": {"learning_rate": 1e-3},
        "federation": {"rounds": 20},
    },
}
ANSWERS: dict[str, dict[str, Any]] = {
    "full": {},
    "without adaptive aggregation": {"adaptive": False},
    "without prototypes": {"prototypes": False},
    "without both": {"adaptive": False, "prototypes": False},
    "full, empty classes doubled": {"empty": "doubled"},
    "full, uncertainty 0.5": {"uncertainty": 0.5},
    "full, all admitted": {"uncertainty": 1.0},
}


def trained(settings: dict[str, Any], dataset: str, seed: int, clients: int, shots: int) -> Finished:
    data = {"dataset": dataset, "clients": clients, "shots": shots, "templates": "bare"}
    return run({**settings, "data": data, "seed": seed, "device": "cpu"})


def query(method: FedMP, tensors: Tensors, test: Samples) -> dict[str, float]:
    """Return a user's accuracy, and the share of images that became examples and of right ones."""
    conversation = Conversation(method, tensors)
    replies = [conversation.ask({"embeddings": images}) for images in test.inputs["embeddings"].split(18)]
    predicted = torch.cat([reply.scores.argmax(-1) for reply in replies])
    examples = torch.cat([reply.example_of for reply in replies])
    admitted = examples >= 0
    right = (examples == test.labels)[admitted]
    return {
        "accuracy": 100 * float((predicted == test.labels).double().mean()),
        "examples": float(admitted.double().mean()),
        "right": float(right.double().mean()) if len(right) else 0.0,
    }


def accuracies(dataset: str, seeds: int, clients: int, shots: int) -> dict[str, dict[str, list[float]]]:
    """Return the accuracy (percent) of each row and seed, with what explains it."""
    rows: dict[str, dict[str, list[float]]] = {}

    def note(row: str, **values: float) -> None:
        for name, value in values.items():
            rows.setdefault(row, {}).setdefault(name, []).append(value)

    for seed in range(seeds):
        open_again = {
            "method": {"name": "fedclip"},
            "training": SAME_STEPS,
            "federation": {"rounds": 2},
            "evaluation": {"protocol": "open", "batch_size": 18},
        }
        finished = trained(open_again, dataset, seed, clients, shots)
        note("zero-shot", accuracy=finished.zero_shot_accuracy)
        note("fedclip", accuracy=finished.accuracy)
        for name, settings in TRAININGS.items():
            finished = trained(settings, dataset, seed, clients, shots)
            prepared, federation = finished.prepared, finished.federation
            start = prepared.method.start(torch_generator(seed, "start"))
            moved = norm({key: federation.shared[key] - start[key] for key in start}) / norm(start)
            alone = [
                query(prepared.queried, {key: sent[key] for key in start}, prepared.test.samples)["accuracy"]
                for sent in federation.last.values()
            ]
            note(f"{name}: best client alone", accuracy=max(alone))
            note(f"{name}: worst client alone", accuracy=min(alone))
            for ablation, options in ANSWERS.items():
                queried = FedMP(
                    FedMPOptions(**{**prepared.experiment.method.options, **options}), prepared.queried.task
                )
                weights = queried.client_weights(federation.last).values() or [1 / clients]  # the plain mean
                note(
                    f"{name}: {ablation}",
                    **query(queried, queried.tailor(federation.shared, federation.last), prepared.test.samples),
                    least_weight=min(weights),
                    most_weight=max(weights),
                    gate_moved=moved,
                    loss=federation.records[-1].loss,
                )
    return rows


def table(rows: dict[str, dict[str, list[float]]]) -> str:
    def spread(values: list[float]) -> float:
        return statistics.stdev(values) if len(values) > 1 else 0.0

    lines = [
        f"{'':58}{'accuracy':>15}{'gain':>15}{'examples':>10}{'right':>8}{'weights':>20}{'gate moved':>12}{'loss':>8}"
    ]
    baseline = rows["zero-shot"]["accuracy"]
    for name, row in rows.items():
        values = row["accuracy"]
        gains = [value - base for value, base in zip(values, baseline, strict=True)]
        text = f"{name:58}{statistics.mean(values):8.2f} ±{spread(values):5.2f}"
        text += f"{statistics.mean(gains):+8.2f} ±{spread(gains):5.2f}"
        if "gate_moved" in row:
            text += f"{statistics.mean(row['examples']):10.1%}{statistics.mean(row['right']):8.1%}"
            text += f"{min(row['least_weight']):10.4f} to {max(row['most_weight']):.4f}"
            text += f"{statistics.mean(row['gate_moved']):12.2%}{statistics.mean(row['loss']):8.3f}"
        lines.append(text)
    return "\n".join(lines)


# Speed --------------------------------------------------------------------------------------------------------------

CLIENTS, CLASSES, SHOTS, WIDTH, BATCH, EPOCHS, RATE, SCALE, ALPHA = 10, 9, 10, 768, 18, 2, 1e-5, 100.0, 0.3


def speed(repeats: int) -> dict[str, float]:
    """Measure seconds of one round of local training at the paper's size.

    That is d = 768 and 10 clients of 9 classes of 10 images. Compared are our engine, a version by
    hand (closed-form gradients and AdamW, written for this problem only) and its matrix products.
    """
    generator = torch.Generator().manual_seed(0)
    count = CLIENTS * CLASSES * SHOTS
    texts = 10 * torch.randn(CLIENTS * CLASSES, WIDTH, generator=generator)
    labels = torch.arange(CLIENTS * CLASSES).repeat_interleave(SHOTS)
    images = texts[labels] + 10 * torch.randn(count, WIDTH, generator=generator)
    encoder: Any = SimpleNamespace(logit_scale=SCALE)
    task = Task(tuple(map(str, range(len(texts)))), texts, encoder, CLIENTS)
    method = FedMP(FedMPOptions(), task)
    training = TrainingConfig(optimiser="adamw", learning_rate=RATE, batch_size=BATCH, local_epochs=EPOCHS)
    rows = torch.arange(count).split(CLASSES * SHOTS)
    engine = LocalEngine(method, Samples({"embeddings": images}, labels), rows, training, FederationConfig(), 0)
    shared = method.start(torch_generator(0, "start"))
    residuals = torch.stack([engine.private_of(client)["residuals"] for client in range(CLIENTS)])
    order = torch.stack([own[batches(c, len(own))] for c, own in enumerate(rows)])  # clients x steps x batch

    def bare() -> Tensors:
        return by_hand(images, labels, texts, shared, residuals, order)

    def products() -> None:
        matrix_products(images, shared, order)

    contestants: dict[str, Callable[[], Any]] = {
        "ours": lambda: engine.train(0, range(CLIENTS), shared),
        "by_hand": bare,
        "matrix_products": products,
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):  # interleaved, so that noise of the machine affects all alike
        for name, contestant in contestants.items():
            began = time.perf_counter()
            contestant()
            if repeat:
                times[name].append(time.perf_counter() - began)
    ours = [result.update.tensors for result in engine.train(0, range(CLIENTS), shared)]
    theirs = bare()
    seconds = {name: statistics.median(values) for name, values in times.items()}
    difference = max(float((mine[k] - theirs[k][c]).abs().max()) for c, mine in enumerate(ours) for k in shared)
    return {
        **seconds,
        "ours_over_by_hand": seconds["ours"] / seconds["by_hand"],
        "ours_over_matrix_products": seconds["ours"] / seconds["matrix_products"],
        "largest_difference": difference,
    }


def batches(client: int, count: int) -> torch.Tensor:
    """Return the order in which our engine takes a client's samples in round 0."""
    return torch.cat([order_of(0, 0, client, count, epoch) for epoch in range(EPOCHS)]).view(-1, BATCH)


def matrix_products(images: torch.Tensor, shared: Tensors, order: torch.Tensor) -> None:
    """Run only the gate's five matrix products of each step.

    Two are forward, two for the gradients of the weights and one for those of the hidden layer.
    """
    first, second = (shared[f"gate.{n}.weight"].expand(CLIENTS, WIDTH, WIDTH).contiguous() for n in (0, 1))
    for step in order.unbind(1):
        inputs = images[step]
        hidden = torch.bmm(inputs, first.transpose(1, 2))
        out = torch.bmm(hidden, second.transpose(1, 2))
        torch.bmm(out.transpose(1, 2), hidden)
        back = torch.bmm(out, second)
        torch.bmm(back.transpose(1, 2), inputs)


def by_hand(
    images: torch.Tensor,
    labels: torch.Tensor,
    texts: torch.Tensor,
    shared: Tensors,
    residuals: torch.Tensor,
    order: torch.Tensor,
) -> Tensors:
    tensors = {name: tensor.expand(CLIENTS, *tensor.shape).clone() for name, tensor in shared.items()}
    tensors["residuals"] = residuals.clone()
    means = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    squares = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    lane = torch.arange(CLIENTS)[:, None]
    for number, step in enumerate(order.unbind(1), start=1):
        z, classes = images[step], labels[step]
        hidden = torch.tanh(torch.baddbmm(tensors["gate.0.bias"][:, None], z, tensors["gate.0.weight"].mT))
        gate = torch.softmax(
            torch.baddbmm(tensors["gate.1.bias"][:, None], hidden, tensors["gate.1.weight"].mT), dim=-1
        )
        x, t = gate * z, texts[classes] + ALPHA * tensors["residuals"][lane, classes]
        x_norm, t_norm = x.norm(dim=-1, keepdim=True), t.norm(dim=-1, keepdim=True)
        x_unit, t_unit = x / x_norm, t / t_norm
        scores = SCALE * torch.bmm(x_unit, t_unit.mT)
        error = (torch.softmax(scores, 2) + torch.softmax(scores, 1) - 2 * torch.eye(BATCH)) * (SCALE / BATCH)
        to_x, to_t = torch.bmm(error, t_unit), torch.bmm(error.mT, x_unit)
        to_x = (to_x - x_unit * (to_x * x_unit).sum(-1, keepdim=True)) / x_norm
        to_t = (to_t - t_unit * (to_t * t_unit).sum(-1, keepdim=True)) / t_norm
        to_gate = to_x * z
        to_out = gate * (to_gate - (to_gate * gate).sum(-1, keepdim=True))
        to_hidden = torch.bmm(to_out, tensors["gate.1.weight"]) * (1 - hidden * hidden)
        gradients = {
            "gate.0.weight": torch.bmm(to_hidden.mT, z),
            "gate.0.bias": to_hidden.sum(1),
            "gate.1.weight": torch.bmm(to_out.mT, hidden),
            "gate.1.bias": to_out.sum(1),
            "residuals": torch.zeros_like(residuals).index_put_((lane, classes), ALPHA * to_t, accumulate=True),
        }
        for name, gradient in gradients.items():
            means[name].lerp_(gradient, 0.1)
            squares[name].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            denominator = (squares[name] / (1 - 0.999**number)).sqrt_().add_(1e-8)
            tensors[name].addcdiv_(means[name], denominator, value=-RATE / (1 - 0.9**number))
    normalize(texts + ALPHA * tensors["residuals"], dim=-1)  # what is sent
    return {name: tensors[name] for name in shared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--shots", type=int, default=8)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of --speed")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.speed:
        print(json.dumps(speed(arguments.repeats), indent=None if arguments.json else 1))
    for dataset in arguments.datasets:
        rows = accuracies(dataset, arguments.seeds, arguments.clients, arguments.shots)
        print(json.dumps({dataset: rows}) if arguments.json else f"{dataset}\n{table(rows)}\n")


if __name__ == "__main__":
    main()
