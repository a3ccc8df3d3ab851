"""Compare Fed-PRIME's local step with the bare forward and backward pass of its transformer.

    python -m benchmarks.fed_prime_step [--device cuda | cpu] [--precision bfloat16] [--clients 10] [--batch 8] [--json]

ViLT-B/32 has its real sizes and random weights, since the time does not depend on them: 40 text
tokens, 145 of an image of 384 x 384, and ten prompts. Ours is one step of all clients of a chunk in
the engine: batches, prompts chosen by each sample, losses, gradients, optimiser. The bare pass is
PyTorch's own TransformerEncoderLayer, twelve of them with frozen weights in the precision of the
products, on as many samples that are embedded already, forward, and backward to the prompts. On a
GPU it runs also as a CUDA graph, and the faster of the two counts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.federation.graphs import Replayed
from fedvl.federation.local import LocalEngine
from fedvl.methods import load_method
from fedvl.methods.base import Samples, Task
from fedvl.models.checkpoint import EMBEDDED_FOLDER
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.tokenizer import load_tokenizer
from fedvl.models.transformer import StackShape
from fedvl.models.vilt import FusedEncoder, ViltShape
from fedvl.seeding import torch_generator

WIDTH, LAYERS, HEADS, HIDDEN, PATCH, GRID, WORDS, PROMPTS = 768, 12, 12, 3072, 32, 12, 40, 10
CLASSES, SEED = 22, 0


def vilt(device: str) -> FusedEncoder:
    """Return ViLT-B/32 with random weights and the embedded tokenizer."""
    tokenizer = load_tokenizer(EMBEDDED_FOLDER, WORDS)
    shape = ViltShape(StackShape(WIDTH, LAYERS, HEADS, HIDDEN, "gelu"), PATCH, GRID, tokenizer.vocabulary, WORDS)
    with torch.device(device):
        encoder = FusedEncoder("vilt-b-32", shape, Preprocessing(PATCH * GRID, PATCH * GRID), tokenizer)
    torch.manual_seed(SEED)
    for name, tensor in encoder.requires_grad_(False).eval().state_dict().items():
        drawn = 0.02 * torch.randn(tensor.shape, device=device)
        tensor.copy_(drawn + 1 if name.endswith("weight") and tensor.dim() == 1 else drawn)
    return encoder


def ours(settings: argparse.Namespace) -> float:
    """Return the median seconds of a step, without the first round, in which graphs are captured."""
    encoder = vilt(settings.device)
    each = settings.batch * settings.steps
    count, generator = settings.clients * each, torch.Generator().manual_seed(SEED)
    texts = encoder.tokenise([" ".join(["a drawing of a small red bird"] * 6)[:200]] * count)
    side = PATCH * GRID
    pixels = torch.randint(256, (each, 3, side, side), generator=generator, dtype=torch.uint8)
    inputs = {
        "tokens": texts.to(settings.device),
        "pixels": pixels.repeat(settings.clients, 1, 1, 1).to(settings.device),
        "present": torch.ones(count, 2, dtype=torch.bool, device=settings.device),
    }
    labels = torch.randint(CLASSES, (count,), generator=generator).to(settings.device)
    names = tuple(f"class {number}" for number in range(CLASSES))
    method_type = load_method("fed-prime")
    task = Task(names, torch.zeros(CLASSES, 0, device=settings.device), encoder, settings.clients)
    method = method_type(method_type.options_type(), task)
    training = TrainingConfig(batch_size=settings.batch, learning_rate=0.05, momentum=0.0, precision=settings.precision)
    rows = torch.arange(count, device=settings.device).split(each)
    config = FederationConfig(rounds=settings.repeats + 2, chunk=settings.clients)
    engine = LocalEngine(method, Samples(inputs, labels), rows, training, config, SEED)
    shared = method.start(torch_generator(SEED, "start"))
    shared = {name: tensor.to(settings.device) for name, tensor in shared.items()}
    calls = iter(range(settings.repeats + 2))
    return timed(lambda: engine.train(next(calls), range(settings.clients), shared), settings) / settings.steps


def bare(settings: argparse.Namespace, as_graph: bool) -> float:
    """Return the median seconds of a forward and backward pass."""
    kind = torch.bfloat16 if settings.precision == "bfloat16" and settings.device != "cpu" else torch.float32
    layers = torch.nn.ModuleList(
        torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, HIDDEN, 0.0, "gelu", batch_first=True, norm_first=True, device=settings.device, dtype=kind
        ).requires_grad_(False)
        for _ in range(LAYERS)
    )
    samples, tokens = settings.clients * settings.batch, WORDS + GRID**2 + 1
    seen = torch.randn(samples, tokens, WIDTH, device=settings.device, dtype=kind)
    prompts = torch.randn(samples, PROMPTS, WIDTH, device=settings.device, dtype=kind)

    def step(leaf: Tensor, rest: Tensor) -> Tensor:
        leaf = leaf.detach().requires_grad_()
        hidden = torch.cat([leaf, rest], 1)
        for layer in layers:
            hidden = layer(hidden)
        (gradient,) = torch.autograd.grad(hidden[:, PROMPTS].float().square().mean(), [leaf])
        return gradient

    run: Callable[..., Any] = Replayed(step) if as_graph else step
    return timed(lambda: run(prompts, seen), settings)


def timed(work: Callable[[], Any], settings: argparse.Namespace) -> float:
    """Return the median seconds of the repeats after the first two."""
    found = []
    high = "high" if settings.precision == "tf32" else "highest"
    torch.set_float32_matmul_precision(high)
    for _ in range(settings.repeats + 2):
        began = time.perf_counter()
        work()
        if settings.device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["float32", "tf32", "bfloat16"], default="float32")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="samples of one client's step")
    parser.add_argument("--steps", type=int, default=4, help="of a client in a round")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    settings = parser.parse_args()
    passes = {"eager": bare(settings, as_graph=False)}
    if settings.device != "cpu":
        passes["graph"] = bare(settings, as_graph=True)
    step = ours(settings)
    found = {
        **{name: value for name, value in vars(settings).items() if name != "json"},
        "step_s": round(step, 5),
        **{f"bare_{name}_s": round(seconds, 5) for name, seconds in passes.items()},
        "ratio": round(step / min(passes.values()), 2),
    }
    if settings.json:
        print(json.dumps(found))
    else:
        print(f"A step takes {found['step_s']} s, the bare pass {min(passes.values()):.5f} s: {found['ratio']} times.")


if __name__ == "__main__":
    main()
