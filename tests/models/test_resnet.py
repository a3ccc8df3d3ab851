"""CLIP's ResNet against a re-computation from its state dict; plain ResNets against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.lazy import lazily
from helpers.models import add_tokenizer, random_weights, unit
from safetensors.torch import save_file
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedvl.errors import FedVLError
from fedvl.models import resnet
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import Clip
from fedvl.models.resnet import ModifiedResNet, ResNetShape

transformers = lazily("transformers")

SHAPE = ResNetShape(width=8, blocks=(2, 1, 1, 1), grid=2)  # 64-pixel images, 256 features, 4 heads
DIM, TEXT_WIDTH = 24, 64


def clip_resnet(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """CLIP's tower by the book, straight from named weights, attention pooling by PyTorch's own function."""

    def conv_norm(x: Tensor, conv: str, norm: str, stride: int = 1) -> Tensor:
        kernel = weights[f"{conv}.weight"]
        x = F.conv2d(x, kernel, None, stride, kernel.shape[-1] // 2)
        mean, variance, weight, bias = (
            weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, variance, weight, bias)

    for index in (1, 2, 3):
        x = conv_norm(x, f"conv{index}", f"bn{index}", 2 if index == 1 else 1).relu()
    x = torch.nn.AvgPool2d(2)(x)
    for stage, blocks in enumerate(SHAPE.blocks, 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            pool = torch.nn.AvgPool2d(2) if stage > 1 and block == 0 else torch.nn.Identity()
            out = conv_norm(x, f"{name}.conv1", f"{name}.bn1").relu()
            out = pool(conv_norm(out, f"{name}.conv2", f"{name}.bn2").relu())
            out = conv_norm(out, f"{name}.conv3", f"{name}.bn3")
            if block == 0:
                x = conv_norm(pool(x), f"{name}.downsample.0", f"{name}.downsample.1")
            x = (x + out).relu()
    tokens = x.flatten(2).permute(2, 0, 1)
    tokens = torch.cat([tokens.mean(0, keepdim=True), tokens]) + weights["attnpool.positional_embedding"][:, None]
    part = {name: weights[f"attnpool.{name}"] for name in (f"{p}_proj.{k}" for p in "qkvc" for k in ("weight", "bias"))}
    pooled, _ = F.multi_head_attention_forward(
        tokens,
        tokens,
        tokens,
        embed_dim_to_check=tokens.shape[-1],
        num_heads=4,
        in_proj_weight=None,
        in_proj_bias=torch.cat([part[f"{p}_proj.bias"] for p in "qkv"]),
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=part["c_proj.weight"],
        out_proj_bias=part["c_proj.bias"],
        use_separate_proj_weight=True,
        q_proj_weight=part["q_proj.weight"],
        k_proj_weight=part["k_proj.weight"],
        v_proj_weight=part["v_proj.weight"],
        training=False,
        need_weights=False,
    )
    return pooled.transpose(0, 1)


def tower_weights() -> dict[str, Tensor]:
    return random_weights(ModifiedResNet(SHAPE, DIM), spread=0.2)


def test_clip_resnet_equals_its_definition() -> None:
    weights, pixels = tower_weights(), torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    tower = ModifiedResNet(SHAPE, DIM).eval()
    tower.load_state_dict(weights)
    expected = clip_resnet(weights, pixels)
    with torch.no_grad():
        torch.testing.assert_close(unit(tower(pixels, None, True)), unit(expected), rtol=0, atol=1e-5)
        torch.testing.assert_close(unit(tower(pixels, None, False)), unit(expected[:, 0]), rtol=0, atol=1e-5)
    assert (unit(expected[0, 0]) - unit(expected[1, 0])).abs().max() > 1e-3


def open_clip_file(folder: Path) -> Path:
    """A whole small RN model under OpenAI's names, with what their files hold beside weights."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "token_embedding.weight": (8200, TEXT_WIDTH),
        "positional_embedding": (20, TEXT_WIDTH),
        "text_projection": (TEXT_WIDTH, DIM),
        "ln_final.weight": (TEXT_WIDTH,),
        "ln_final.bias": (TEXT_WIDTH,),
    }
    wide = 4 * TEXT_WIDTH
    block = {"attn.in_proj_weight": (3 * TEXT_WIDTH, TEXT_WIDTH), "attn.in_proj_bias": (3 * TEXT_WIDTH,)}
    block |= {f"{norm}.{kind}": (TEXT_WIDTH,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
    for name, rows, columns in (
        ("attn.out_proj", TEXT_WIDTH, TEXT_WIDTH),
        ("mlp.c_fc", wide, TEXT_WIDTH),
        ("mlp.c_proj", TEXT_WIDTH, wide),
    ):
        block |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    shapes |= {f"transformer.resblocks.{layer}.{name}": shape for layer in range(2) for name, shape in block.items()}
    tensors = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    tensors |= {f"visual.{name}": value for name, value in tower_weights().items()}
    tensors |= {"visual.bn1.num_batches_tracked": torch.tensor(7), "logit_scale": torch.tensor(4.6052)}
    tensors |= {
        "input_resolution": torch.tensor(64),
        "context_length": torch.tensor(20),
        "vocab_size": torch.tensor(8200),
    }
    save_file(tensors, folder / "rn.safetensors")
    return folder / "rn.safetensors"


def test_open_clip_resnet_file_loads_with_sizes_read_off_its_tensors(tmp_path: Path) -> None:
    path = open_clip_file(tmp_path)
    with pytest.warns(UserWarning, match="quick_gelu"), pytest.raises(FedVLError, match="There is no tokenizer"):
        load_model(str(path))
    add_tokenizer(tmp_path)
    with pytest.warns(UserWarning, match="quick_gelu"):
        model = load_model(str(path))
    assert isinstance(model, Clip)
    assert (model.dim, model.image_size, model.vision_width, model.vision_layers) == (DIM, 64, 256, 0)
    assert (model.text_width, model.text_layers, model.patches) == (TEXT_WIDTH, 2, 4)
    assert model.logit_scale == pytest.approx(100, abs=0.01)
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    pooled, spatial = model.encode_patches(pixels)
    expected = unit(clip_resnet(tower_weights(), pixels))
    torch.testing.assert_close(unit(torch.cat([pooled[:, None], spatial], 1)), expected, rtol=0, atol=1e-5)
    tokens = model.tokenise(["a dog", "a red car on the road"])
    torch.testing.assert_close(model.encode_text(tokens), text_by_pytorch(model, tokens), rtol=0, atol=1e-5)
    with pytest.raises(FedVLError, match="ViT"):
        model.encode_image(pixels, torch.zeros(1, 2, 256))
    with pytest.raises(FedVLError, match="ViT"):
        model.encode_image(pixels, tokens=torch.zeros(2, 256))


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def text_by_pytorch(model: Clip, tokens: Tensor) -> Tensor:
    """The text tower by PyTorch's own encoder layer, whole sequences, one head (64 wide)."""
    layer = torch.nn.TransformerEncoderLayer(
        TEXT_WIDTH, 1, 4 * TEXT_WIDTH, 0.0, quick_gelu, norm_first=True, batch_first=True
    )
    names = {"self_attn": "attn", "norm1": "ln_1", "norm2": "ln_2", "linear1": "mlp.c_fc", "linear2": "mlp.c_proj"}
    x = model.token_embedding(tokens) + model.positional_embedding[: tokens.shape[1]]
    hidden = torch.triu(torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool), 1)
    for block in model.transformer.resblocks:
        ours = dict(block.named_parameters())
        weights: dict[str, Tensor] = {}
        for name in layer.state_dict():
            head, rest = name.split(".", 1)
            weights[name] = ours[f"{names[head]}.{rest}"]
        x = functional_call(layer, weights, (x, hidden))
    ends = tokens.argmax(-1)
    return model.ln_final(x)[torch.arange(len(tokens)), ends] @ model.text_projection


# --- plain ResNets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth, parameters", [(18, 11_689_512), (50, 25_557_032)])
def test_plain_resnets_have_the_well_known_sizes(depth: int, parameters: int) -> None:
    tensors = resnet.initial(depth, 1000, torch.Generator().manual_seed(0))
    assert sum(tensor.numel() for name, tensor in tensors.items() if "running" not in name) == parameters


def in_transformers(tensors: dict[str, Tensor], depth: int) -> torch.nn.Module:
    wide = 4 if depth == 50 else 1
    config = transformers.ResNetConfig(
        depths=list(resnet.BLOCKS[depth]),
        hidden_sizes=[64 * wide * 2**stage for stage in range(4)],
        layer_type="bottleneck" if depth == 50 else "basic",
    )
    model = transformers.ResNetModel(config)
    renamed = {}
    for name, tensor in tensors.items():
        kind = name.rsplit(".", 1)[1]
        if name.startswith(("conv1", "bn1")):
            part = "convolution" if name.startswith("conv1") else "normalization"
            renamed[f"embedder.embedder.{part}.{kind}"] = tensor
        elif name.startswith("layer"):
            stage, block, inner = name.split(".")[:3]
            place = f"encoder.stages.{int(stage[-1]) - 1}.layers.{block}."
            if inner == "downsample":
                part = "convolution" if ".downsample.0." in name else "normalization"
                renamed[f"{place}shortcut.{part}.{kind}"] = tensor
            else:
                part = "convolution" if inner.startswith("conv") else "normalization"
                renamed[f"{place}layer.{int(inner[-1]) - 1}.{part}.{kind}"] = tensor
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    return model


@pytest.mark.parametrize("depth", [18, 50])
def test_plain_resnets_equal_transformers_in_training_and_after(depth: int) -> None:
    tensors = resnet.initial(depth, 10, torch.Generator().manual_seed(0))
    reference = in_transformers(tensors, depth).train()
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features, changed = resnet.forward(tensors, images, training=True)
        torch.testing.assert_close(features, reference(images).pooler_output.flatten(1), rtol=1e-3, atol=1e-4)
        assert set(changed) == {name for name in tensors if "running" in name}
        features, unchanged = resnet.forward({**tensors, **changed}, images, training=False)
        torch.testing.assert_close(features, reference.eval()(images).pooler_output.flatten(1), rtol=1e-3, atol=1e-4)
    assert not unchanged


def test_an_absent_image_leaves_no_trace_in_the_batch_statistics() -> None:
    tensors = resnet.initial(18, 10, torch.Generator().manual_seed(0))
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    alone, changed = resnet.forward(tensors, images[:3], training=True)
    padded, padded_changed = resnet.forward(tensors, images, training=True, present=torch.tensor([1, 1, 1, 0]))
    torch.testing.assert_close(padded[:3], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded_changed, changed, rtol=1e-4, atol=1e-5)


def test_clients_train_plain_resnets_batched() -> None:
    # In double precision: three images a batch make the variances small and the gradients touchy.
    clients = [
        {name: tensor.double() for name, tensor in resnet.initial(18, 4, torch.Generator().manual_seed(seed)).items()}
        for seed in range(2)
    ]
    stacked = {name: torch.stack([client[name] for client in clients]) for name in clients[0]}
    images = torch.randn(2, 3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    labels = torch.tensor([0, 1, 2])

    def loss(tensors: dict[str, Tensor], images: Tensor) -> Tensor:
        features, _ = resnet.forward(tensors, images, training=True)
        return F.cross_entropy(resnet.head_scores(tensors, features), labels)

    batched = vmap(grad(loss))(stacked, images)
    for client in range(2):
        alone = grad(loss)(clients[client], images[client])
        for name in ("conv1.weight", "layer3.0.downsample.1.bias", "fc.weight"):
            torch.testing.assert_close(batched[name][client], alone[name], rtol=1e-6, atol=1e-9)
        assert alone["conv1.weight"].abs().max() > 1e-3


def test_other_depths_are_refused() -> None:
    with pytest.raises(FedVLError, match="18 or 50"):
        resnet.initial(34, 10, torch.Generator())
