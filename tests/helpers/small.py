"""A small federation on synthetic features: what tests of the engine and of feature methods share."""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from fedvl.config import FederationConfig, PrivacyConfig, TrainingConfig
from fedvl.federation.count_noise import count_noise
from fedvl.federation.local import LocalEngine
from fedvl.federation.privacy import ClientPrivacy, RecordPrivacy
from fedvl.federation.round import Federation
from fedvl.methods import load_method
from fedvl.methods.base import Batch, Mean, Method, Samples, Task
from fedvl.methods.fedavg_nn import FedAvgNN, NetworkOptions
from fedvl.models.checkpoint import EMBEDDED_FOLDER
from fedvl.models.clip import Clip, ClipShape, DualEncoder, ViTShape
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.tokenizer import load_tokenizer
from fedvl.models.transformer import StackShape
from fedvl.models.vilt import FusedEncoder, ViltShape
from fedvl.seeding import keys_of, torch_generator
from fedvl.tensors import Tensors

AnyFederation = TypeVar("AnyFederation", bound=Federation)

CLASSES, WIDTH = 4, 6
RAGGED = (7, 0, 1, 12, 5)  # samples of each client: one has none, one has one
SIDE = 64  # pixels of a small image: the last layers of a network still see 2 x 2 positions
PATCHES = 4  # positions of a small image in the encoder
FUSED = ("fed-prime", "fed-inter", "fed-intra", "fedavg-p", "fedprox-p", "fedmsplit-p")  # methods on a fused encoder
PAPERS = ("fst-cbdg", "fed-mp", "fedpp", "cachefl", "fed-prime")  # the methods of the five papers
FIELD = ("fedpgp", "promptfolio", "pfedmma", "pfedmoap", "fedpha", "fedmgp", "fedmvp")  # methods after the papers
NETWORK = {"width": 4}  # options of the methods that train a network on pixels


def small_task(classes: int = CLASSES, width: int = WIDTH, clients: int = len(RAGGED)) -> Task:
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(classes, width, generator=generator)
    target = {"pixels": random_pixels(8, generator)}
    target["features"] = torch.nn.functional.normalize(torch.randn(8, width, generator=generator), dim=-1)
    names = tuple(f"class {c}" for c in range(classes))
    return Task(names, embeddings, small_encoder(width), clients, target=target)


class SmallEncoder(Clip):
    """Pixels come out in double precision, in which networks are compared (:func:`doubled`)."""

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.double() / 128 - 1


@cache
def small_encoder(joint: int = WIDTH, text_width: int = 8, kind: type[Clip] = SmallEncoder) -> DualEncoder:
    """Two layers of random weights in each tower, with the embedded tokenizer and a logit scale of 10."""
    tokenizer = load_tokenizer(EMBEDDED_FOLDER, 32)
    vision = ViTShape(StackShape(width=8, layers=2, heads=2, hidden=16), patch=SIDE // 2, grid=2)
    text = StackShape(width=text_width, layers=2, heads=2, hidden=16)
    shape = ClipShape(joint, vision, text, tokenizer.vocabulary, tokenizer.length)
    encoder = kind("small", shape, Preprocessing(SIDE, SIDE), tokenizer).requires_grad_(False).eval()
    draw_weights(encoder)
    encoder.log_scale.fill_(math.log(10))
    return encoder


@cache
def small_fused_encoder() -> FusedEncoder:
    """Two layers of random weights with the embedded tokenizer: 5 image tokens, of which 4 are patches."""
    tokenizer = load_tokenizer(EMBEDDED_FOLDER, 16)
    stack = StackShape(width=8, layers=2, heads=2, hidden=16, activation="gelu")
    shape = ViltShape(stack, SIDE // 2, 2, tokenizer.vocabulary, tokenizer.length)
    encoder = FusedEncoder("small-fused", shape, Preprocessing(SIDE, SIDE), tokenizer).requires_grad_(False).eval()
    draw_weights(encoder)
    return encoder


def encoder_of(**attributes: Any) -> Any:
    """Where a method asks its encoder for nothing else."""
    return SimpleNamespace(**attributes)


def draw_weights(encoder: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    for name, tensor in encoder.state_dict().items():
        drawn = 0.3 * torch.randn(tensor.shape, generator=generator)
        tensor.copy_(drawn + 1 if name.endswith("weight") and tensor.dim() == 1 else drawn)


def small_fused_task(clients: int = len(RAGGED)) -> Task:
    names = tuple(f"class {c}" for c in range(CLASSES))
    return Task(names, torch.zeros(CLASSES, 0), small_fused_encoder(), clients)


def random_pixels(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(256, (count, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)


def small_method(name: str, **options: Any) -> Any:
    """Of any type, for a test asks for what its own method alone has."""
    method_type = load_method(name)
    if "tokens" in method_type.inputs:
        return method_type(method_type.options_type(**options), small_fused_task())
    if "width" not in method_type.options_type.model_fields:
        return method_type(method_type.options_type(**options), small_task())
    return doubled(method_type(method_type.options_type(**(NETWORK | options)), small_task()))


def doubled(method: Method) -> Method:
    """In double precision: dozens of layers magnify rounding, and what is compared is the arithmetic."""
    changed: Any = method
    start, join = method.start, method.join
    changed.start = lambda generator: {name: tensor.double() for name, tensor in start(generator).items()}
    changed.join = lambda samples, seed: {name: tensor.double() for name, tensor in join(samples, seed).items()}
    return method


def small_samples(method: Method, count: int = sum(RAGGED), seed: int = 2) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(method.task.class_names), (count,), generator=generator)
    if "tokens" in method.inputs:
        return Samples(fused_inputs(method.task.fused, labels, generator), labels)
    images = method.task.text_embeddings[labels] + torch.randn(count, WIDTH, generator=generator)
    forms = {"embeddings": images, "features": torch.nn.functional.normalize(images, dim=-1)}
    if "pixels" in method.inputs:
        forms["pixels"] = random_pixels(count, generator)
    if "patches" in method.inputs:
        spread = torch.randn(count, PATCHES, WIDTH, generator=generator)
        forms["patches"] = torch.nn.functional.normalize(images[:, None] + spread, dim=-1)
    return Samples({name: forms[name] for name in method.inputs}, labels)


def labelled_rows(count: int, width: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit rows in float64 and random labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.nn.functional.normalize(torch.randn(count, width, generator=generator).double(), dim=-1)
    return rows, torch.randint(classes, (count,), generator=generator)


def fused_inputs(encoder: FusedEncoder, labels: torch.Tensor, generator: torch.Generator) -> Tensors:
    """The first client (of ``RAGGED``) has texts alone, the last images alone, the others some of each kind."""
    rows = torch.arange(len(labels))
    has_text = (rows < RAGGED[0]) | ((rows < len(rows) - RAGGED[-1]) & (rows % 3 > 0))
    has_image = (rows >= len(rows) - RAGGED[-1]) | ((rows >= RAGGED[0]) & (rows % 3 < 2))
    texts = [f"a drawing of thing {int(label)}" * bool(text) for label, text in zip(labels, has_text, strict=True)]
    present = torch.stack([has_text, has_image], 1)
    return {"tokens": encoder.tokenise(texts), "pixels": random_pixels(len(rows), generator), "present": present}


def small_batch(method: Method, rows: torch.Tensor) -> Batch:
    samples = small_samples(method).take(rows)
    return Batch(samples.inputs, samples.labels, torch.ones(len(rows)), rows, {})


def batch_of(samples: Samples, received: Tensors | None = None, noise: Tensors | None = None) -> Batch:
    """All of these samples as one batch."""
    count = len(samples)
    return Batch(samples.inputs, samples.labels, torch.ones(count), torch.arange(count), received or {}, noise or {})


def small_open_method(
    method_type: type[FedAvgNN] = FedAvgNN, options_type: type[NetworkOptions] = NetworkOptions, **options: Any
) -> Method:
    """A network whose clients have heads of their own: the open protocol."""
    return doubled(method_type(options_type(width=4, **options), replace(small_task(), protocol="open")))


class SmallFederation(Federation):
    """All clients in this process."""

    method: Any  # as small_method
    engine: LocalEngine


def small_federation(
    method: Method, training: dict[str, Any] | None = None, privacy: PrivacyConfig | None = None, **federation: Any
) -> SmallFederation:
    network = "pixels" in method.inputs  # slow: fewer steps
    config = FederationConfig(**{"rounds": 2 if network else 3, **federation})
    rows = torch.arange(sum(RAGGED)).split(RAGGED)
    steps = TrainingConfig(
        **{"batch_size": 4, "local_epochs": 1 if network else 2, "learning_rate": 0.05, **(training or {})}
    )
    method.task = replace(method.task, training=steps)
    engine = LocalEngine(method, small_samples(method), rows, steps, config, seed=0, privacy=privacy)
    found = SmallFederation(method, engine, config, 0, method.start(torch_generator(0, "start")))
    if privacy and privacy.unit == "client":
        counts = count_noise(method, found.shared, config.rounds, config.least_clients if config.secure_sum else 1)
        expected = config.per_round or len(RAGGED)
        found.privacy = ClientPrivacy(privacy, config.rounds, len(RAGGED), expected, 0, counts=counts)
    elif privacy and privacy.unit == "record":
        found.privacy = RecordPrivacy(privacy, steps, config.rounds)
    return found


def run_quietly(federation: AnyFederation) -> AnyFederation:
    federation.run()
    return federation


def drawn(method: Method, client: int = 0) -> Tensors:
    """Draw the random numbers of a client's first step."""
    return {name: draw(keys_of(0, torch.tensor([client]), 0))[0] for name, draw in method.noise().items()}


def stepped(method: Method, moves: list[float]) -> tuple[list[float], Tensors]:
    """Return the bias of a class after each mean move of it, and the last state."""
    state, found = method.start(torch.Generator()), []
    for move in moves:
        mean = {name: state[name] + move * (name == "bias") for name in ("weight", "bias")}
        state = state | method.step(state, Mean(mean))
        found.append(float(state["bias"][0]))
    return found, state
