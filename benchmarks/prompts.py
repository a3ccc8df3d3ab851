"""Compare seconds per round of the prompt methods with a plain implementation of the same work.

    python -m benchmarks.prompts [--model vit-b-16 | fedvl-tiny] [--device cuda | cpu]
        [--precision bfloat16] [--memory]

ViT-B/16 has CLIP's sizes and random weights, since the time does not depend on them. The plain
implementation does what the public code of these methods does: one client after another, a
DataLoader over images that are encoded again in each step, class texts padded to all of the model's
positions, PyTorch's own layers with their fused attention, ``torch.optim.SGD``. Both take the same
steps on the same batches in the same precision; the difference of their results, relative to how
far training moved, is printed with the times. The first round of each is not timed, nor is FedPP's
choice of labels, which happens in it. ``--memory`` instead prints the peak memory of PromptFL's
training as clients and classes grow.
"""

import argparse
import json
import math
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from benchmarks.plain_clip import PlainClip
from fedvl.config import FederationConfig, TrainingConfig
from fedvl.federation.local import LocalEngine
from fedvl.federation.orders import order_of
from fedvl.federation.round import Federation
from fedvl.methods import load_method
from fedvl.methods.base import Method, Samples, Task
from fedvl.models.checkpoint import EMBEDDED_FOLDER, load_model
from fedvl.models.clip import Clip, ClipShape, DualEncoder, ViTShape
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.tokenizer import load_tokenizer
from fedvl.models.transformer import StackShape
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors
from tests.helpers.runs import norm

RATE, MOMENTUM, DECAY, SEED = 0.01, 0.9, 5e-4, 0
FLOOR = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # bytes of the process before any model
VIT_B_16 = ClipShape(
    512, ViTShape(StackShape(768, 12, 12, 3072), patch=16, grid=14), StackShape(512, 12, 8, 2048), 49408, 77
)
SIZES = {  # clients, images per client, classes, rounds
    "vit-b-16": (10, 64, 100, 3),
    "fedvl-tiny": (10, 32, 10, 2),
}
MEMORY = ((10, 100), (10, 1000), (100, 1000))  # clients, classes
OPTIONS = {"fedpp": {"selection": "zero-shot"}}  # labels every image, so that all methods train on equally many
KINDS = ("small", "large", "red", "blue", "green", "old", "young", "wooden", "wild", "striped", "spotted", "flying")
THINGS = (
    "bird",
    "dog",
    "cat",
    "horse",
    "car",
    "boat",
    "house",
    "tree",
    "flower",
    "fish",
    "chair",
    "lamp",
    "cup",
    "shoe",
)


class Run(NamedTuple):
    """Result of one way of training."""

    seconds: list[float]  # of each timed round
    shared: Tensors
    private: dict[int, Tensors]


class Contest:
    """A method on random images, which can be run both ways."""

    def __init__(self, name: str, encoder: DualEncoder, settings: argparse.Namespace) -> None:
        self.name, self.encoder, self.settings = name, encoder, settings
        self.device = encoder.log_scale.device
        generator = torch.Generator().manual_seed(SEED)
        count, side = settings.clients * settings.images, encoder.image_size
        self.images = torch.randint(256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
        self.labels = torch.randint(settings.classes, (count,), generator=generator)
        self.rows = torch.split(torch.arange(count), settings.images)
        method = load_method(name)
        self.method = method(
            method.options_type(**OPTIONS.get(name, {})), task_of(encoder, settings.classes, settings.clients)
        )
        self.training = TrainingConfig(
            batch_size=settings.batch,
            learning_rate=RATE,
            momentum=MOMENTUM,
            weight_decay=DECAY,
            precision=settings.precision,
        )

    def ours(self) -> tuple[Run, float, Tensors, dict[int, Tensors]]:
        """Return our run, the seconds of encoding, and the initial shared and private tensors."""
        began = time.perf_counter()
        samples = Samples(self.encoded(), self.labels.to(self.device))
        wait(self.device)
        encoding = time.perf_counter() - began
        config = FederationConfig(rounds=self.settings.rounds + 1, chunk=self.settings.chunk)
        engine = LocalEngine(
            self.method, samples, [rows.to(self.device) for rows in self.rows], self.training, config, SEED
        )
        start = self.method.start(torch_generator(SEED, "start"))
        start = {name: tensor.to(self.device) for name, tensor in start.items()}
        federation = Federation(self.method, engine, config, SEED, start)
        private = {client: self.trained(engine.private_of(client)) for client in range(self.settings.clients)}
        times: list[float] = []

        def after(record: Any) -> None:
            wait(self.device)
            times.append(time.perf_counter())

        federation.run(after_round=after)
        if "fedpp" in self.name:  # it draws its own labels in the first round and every fifth
            self.labels = torch.cat([engine.private[client]["labels"].cpu() for client in private])
        return Run(differences(times), federation.shared, engine.private), encoding, start, private

    def trained(self, private: Tensors) -> Tensors:
        return {name: private[name] for name in self.method.role.trained_private}

    def encoded(self) -> Tensors:
        """Return the images as our runs read them: encoded once, and rounded as in the cache."""
        encoder = self.encoder

        def each(encode: Callable[[Tensor], Tensor]) -> Tensor:
            with torch.inference_mode():
                parts = [encode(encoder.normalise(part.to(self.device))) for part in torch.split(self.images, 64)]
                rounded = torch.cat(parts).half()
            return rounded.clone()

        forms: dict[str, Callable[[], Tensor]] = {
            "features": lambda: normalize(each(encoder.encode_image).float(), dim=-1),
            "patches": lambda: each(lambda pixels: encoder.encode_patches(pixels)[1]),
            "pixels": lambda: self.images.to(self.device),
        }
        return {name: forms[name]() for name in self.method.inputs}

    def plain(self, start: Tensors, private: dict[int, Tensors]) -> Run:
        scores = partial(PLAIN[self.name], PlainClip(self.encoder, self.method.task.class_names))
        shared, kept = start, dict(private)
        times: list[float] = []
        for round_index in range(self.settings.rounds + 1):
            sent = []
            for client, rows in enumerate(self.rows):
                order = rows[order_of(SEED, round_index, client, len(rows))]
                trained = self.train_one(scores, {**kept[client], **shared}, order)
                sent.append({name: trained[name] for name in shared})
                kept[client] = {name: trained[name] for name in kept[client]}
            shared = {name: torch.stack([tensors[name] for tensors in sent]).mean(0) for name in shared}
            wait(self.device)
            times.append(time.perf_counter())
        return Run(differences(times), shared, kept)

    def train_one(self, scores: Callable[[Tensors, Tensor], Tensor], tensors: Tensors, order: Tensor) -> Tensors:
        from torch.utils.data import DataLoader, TensorDataset

        trained = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        optimiser = torch.optim.SGD(trained.values(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
        loader = DataLoader(TensorDataset(self.images, self.labels), self.settings.batch, sampler=order.tolist())
        mixed = self.settings.precision == "bfloat16" and self.device.type == "cuda"
        for images, labels in loader:
            optimiser.zero_grad()
            pixels = self.encoder.normalise(images.to(self.device))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
                loss = cross_entropy(scores(trained, pixels), labels.to(self.device))
            torch.autograd.backward(loss)
            optimiser.step()
        return {name: tensor.detach() for name, tensor in trained.items()}

    def result(self) -> dict[str, Any]:
        ours, encoding, start, private = self.ours()
        plain = self.plain(start, private)
        our_round, plain_round = statistics.median(ours.seconds), statistics.median(plain.seconds)
        return {
            "method": self.name,
            "ours_seconds_a_round": round(our_round, 4),
            "plain_seconds_a_round": round(plain_round, 4),
            "ratio": round(plain_round / our_round, 1),
            "encoding_once_seconds": round(encoding, 3),
            "ratio_of_10_rounds_with_encoding": round(10 * plain_round / (10 * our_round + encoding), 1),
            "steps_a_round": self.settings.clients * math.ceil(self.settings.images / self.settings.batch),
            "difference_of_results": apart(ours.shared, plain.shared, start),
            "difference_of_private": max(
                (apart(ours.private[c], plain.private[c], private[c]) for c in private if private[c]), default=None
            ),
        }


def plain_promptfl(clip: PlainClip, tensors: Tensors, pixels: Tensor) -> Tensor:
    texts = normalize(clip.texts(tensors["context"]), dim=-1)
    return clip.scale * normalize(clip.image(pixels)[:, 0], dim=-1) @ texts.T


def plain_fedotp(clip: PlainClip, tensors: Tensors, pixels: Tensor) -> Tensor:
    """Return FedOTP's scores as the released code computes them.

    Scaling is outside the log domain and stops when it has converged.
    """
    texts = torch.stack([normalize(clip.texts(tensors[name]), dim=-1) for name in ("context", "local_context")])
    patches = normalize(clip.image(pixels)[:, 1:], dim=-1)
    similarity = torch.einsum("bmd,ncd->bcmn", patches, texts).float()
    with torch.no_grad():
        kernel = torch.exp((similarity - 1) / 0.1)
        size = kernel.shape[2]
        right = torch.ones_like(kernel[:, :, 0])
        for _ in range(100):
            left = (1 / size / (kernel * right[..., None, :]).sum(-1)).clamp(max=1)
            before, right = right, 0.4 / (kernel * left[..., None]).sum(-2)
            if (right - before).abs().mean() < 1e-3:
                break
        plan = left[..., None] * kernel * right[..., None, :]
    return clip.scale * (plan * similarity).sum((-2, -1))


def plain_fedpp(clip: PlainClip, tensors: Tensors, pixels: Tensor) -> Tensor:
    texts = normalize(clip.texts(tensors["context"]), dim=-1)
    return clip.scale * normalize(clip.image(pixels, tensors["visual"])[:, 0], dim=-1) @ texts.T


PLAIN: dict[str, Callable[[PlainClip, Tensors, Tensor], Tensor]] = {
    "promptfl": plain_promptfl,
    "fedotp": plain_fedotp,
    "fedpp": plain_fedpp,
}


def build(model: str, device: str) -> DualEncoder:
    """Return the embedded model, or ViT-B/16 with random weights.

    The latter uses the embedded tokenizer, whose tokens any CLIP has.
    """
    if model == "fedvl-tiny":
        loaded = load_model(model, device)
        assert isinstance(loaded, DualEncoder)
        return loaded
    with torch.device(device):
        encoder = Clip(model, VIT_B_16, Preprocessing(224, 224), load_tokenizer(EMBEDDED_FOLDER, 77))
    encoder = encoder.requires_grad_(False).eval()
    torch.manual_seed(SEED)
    for name, tensor in encoder.state_dict().items():
        if tensor.dim() > 1 or "embedding" in name:
            tensor.normal_(std=0.04)
        else:
            tensor.fill_(1.0 if name.endswith("weight") else 0.0)
    encoder.log_scale.fill_(math.log(100))
    return encoder


def task_of(encoder: DualEncoder, classes: int, clients: int) -> Task:
    things = [f"{kind} {thing}" for kind in KINDS for thing in THINGS]
    names = tuple(f"{things[c % len(things)]} {chr(ord('a') + c // len(things))}" for c in range(classes))
    embeddings = torch.randn(classes, encoder.dim, generator=torch.Generator().manual_seed(SEED))
    return Task(names, embeddings.to(encoder.log_scale.device), encoder, clients)


def memory(encoder: DualEncoder, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the peak bytes of one PromptFL step on each client of a round, above those before."""
    device = encoder.log_scale.device
    found = []
    for clients, classes in MEMORY:
        method_type = load_method("promptfl")
        method: Method = method_type(method_type.options_type(), task_of(encoder, classes, clients))
        generator = torch.Generator().manual_seed(SEED)
        count = clients * settings.batch
        features = normalize(torch.randn(count, encoder.dim, generator=generator), dim=-1).to(device)
        samples = Samples({"features": features}, torch.randint(classes, (count,), generator=generator).to(device))
        config = FederationConfig(rounds=1, chunk=settings.chunk)
        training = TrainingConfig(batch_size=settings.batch, learning_rate=RATE, precision=settings.precision)
        rows = [part.to(device) for part in torch.split(torch.arange(count), settings.batch)]
        engine = LocalEngine(method, samples, rows, training, config, SEED)
        before = settle(device)
        began = time.perf_counter()
        engine.train(0, range(min(clients, settings.per_round)), method.start(torch_generator(SEED, "start")))
        wait(device)
        found.append(
            {
                "clients": clients,
                "trained": min(clients, settings.per_round),
                "at_once": settings.chunk,
                "classes": classes,
                "seconds": round(time.perf_counter() - began, 2),
                "peak_mebibytes": round((peak(device) - before) / 2**20),
            }
        )
    return found


def settle(device: torch.device) -> int:
    """Reset the peak memory and return the bytes in use.

    A process's own peak can only grow, so measurements go from small to large.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return FLOOR


def peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def differences(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def apart(left: Tensors, right: Tensors, start: Tensors) -> float:
    """Return the difference of two results, relative to how far the second is from the start."""
    moved = norm({name: right[name] - start[name] for name in start})
    return round(norm({name: left[name] - right[name] for name in start}) / moved, 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="vit-b-16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--methods", nargs="+", choices=list(PLAIN), default=list(PLAIN))
    for name in ("clients", "images", "classes", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=10, help="clients trained in one kernel")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--per-round", type=int, default=100, help="clients that train, with --memory")
    settings = parser.parse_args()
    for name, value in zip(("clients", "images", "classes", "rounds"), SIZES[settings.model], strict=True):
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    encoder = build(settings.model, settings.device)
    name = torch.cuda.get_device_name() if settings.device.startswith("cuda") else "cpu"
    print(json.dumps({**vars(settings), "device": name, "torch": torch.__version__}), flush=True)
    if settings.memory:
        for line in memory(encoder, settings):
            print(json.dumps(line), flush=True)
        return
    for method in settings.methods:
        print(json.dumps(Contest(method, encoder, settings).result()), flush=True)


if __name__ == "__main__":
    main()
