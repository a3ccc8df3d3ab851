"""Train the tiny ViLT on the dual encoder's images and texts, started from the dual encoder's vision tower.

Losses on image and text pairs: is this the image's text (matching), which words are masked, and regression of the
pooled state to the frozen dual encoder's image and text embeddings. In some pairs the text or the image is missing.
Writes OUT as a model folder, fp16. The shipped run's settings are the defaults.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import CLIPModel

from tools.pretrain.augment import augment
from tools.pretrain.build_text import CAPTIONS_PER_IMAGE
from tools.pretrain.folders import load_clip, save_folder
from tools.pretrain.fused import Heads, build_vilt, empty_text, fuse, start_from_clip, text_mask
from tools.pretrain.images import standardise
from tools.pretrain.runtime import Budget, choose_device, descend, mixed_precision, set_learning_rate
from tools.pretrain.training_set import TrainingSet, load_training_set

CAPTION_WEIGHT = 4.0  # captions are the richer text: Flickr8k images are drawn four times as often
SWAPPED = 0.5  # share of pairs that get another image's text
MISSING = 0.08  # share without text, and the same share without image
MASKED_PAIRS, MASKED_WORDS = 0.5, 0.2
WARMUP = 200
WORD_WEIGHT, REGRESSION_WEIGHT = 0.5, 2.0


@dataclass
class Pairs:
    pixels: torch.Tensor  # standardised; zeros where the image is missing
    tokens: torch.Tensor
    match: torch.Tensor
    no_text: torch.Tensor
    no_image: torch.Tensor
    image_target: torch.Tensor  # the dual encoder's embeddings
    text_target: torch.Tensor
    mask: torch.Tensor
    hidden_word: torch.Tensor  # tokens to be guessed


class PairSource:
    """Draws random pairs and what the dual encoder makes of them."""

    def __init__(self, data: TrainingSet, clip: CLIPModel, batch: int) -> None:
        self.data, self.clip, self.batch, self.device = data, clip, batch, data.images.device
        self.usable = ((data.label >= 0) | (data.caption >= 0)).nonzero().squeeze(1)
        self.weight = torch.where(data.caption[self.usable] >= 0, CAPTION_WEIGHT, 1.0)

    def _rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=self.device)

    @torch.no_grad()
    def draw(self) -> Pairs:
        data, count = self.data, self.batch
        chosen = self.usable[torch.multinomial(self.weight, count, replacement=True)]
        pixels = standardise(augment(data.images[chosen]))
        label, caption = data.label[chosen], data.caption[chosen]
        which = torch.randint(0, CAPTIONS_PER_IMAGE, (count,), device=self.device)
        captions = data.caption_tokens[caption.clamp(min=0), which]
        which = torch.randint(0, data.concept_tokens.shape[1], (count,), device=self.device)
        sentences = data.concept_tokens[data.leaf[label.clamp(min=0)], which]
        tokens = torch.where((caption >= 0)[:, None], captions, sentences).long()

        swapped = self._rand(count) < SWAPPED
        places = torch.arange(count, device=self.device)
        text_of = torch.where(swapped, places.roll(1), places)
        match = ~swapped | ((label >= 0) & (label == label[text_of]))  # the same label is no mismatch
        tokens = tokens[text_of]
        fate = self._rand(count)
        no_text, no_image = fate < MISSING, fate > 1 - MISSING
        tokens = torch.where(no_text[:, None], empty_text(tokens, data.start, data.end), tokens)
        pixels = torch.where(no_image[:, None, None, None], torch.zeros_like(pixels), pixels)

        with mixed_precision(self.device):
            image = self.clip.visual_projection(self.clip.vision_model(pixel_values=pixels).pooler_output)
            text = self.clip.text_projection(self.clip.text_model(input_ids=tokens).pooler_output)
        mask = text_mask(tokens, data.end)
        hidden_word = (self._rand(*tokens.shape) < MASKED_WORDS) & (mask > 0)
        hidden_word &= (tokens != data.end) & (tokens != data.start) & (self._rand(count, 1) < MASKED_PAIRS)
        return Pairs(
            pixels=pixels,
            tokens=tokens,
            match=match,
            no_text=no_text,
            no_image=no_image,
            image_target=F.normalize(image.float(), dim=1),
            text_target=F.normalize(text.float(), dim=1),
            mask=mask,
            hidden_word=hidden_word,
        )


def pair_losses(
    pairs: Pairs, heads: Heads, hidden: torch.Tensor, pooled: torch.Tensor, word_embeddings: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Losses by name, and the matching accuracy; each over the pairs that have what it needs."""
    both = ~(pairs.no_text | pairs.no_image)
    # At most two words a pair, so that shapes and memory stay bounded.
    guessed = pairs.hidden_word.flatten().nonzero().squeeze(1)[: 2 * len(pairs.tokens)]
    states = hidden[:, : pairs.tokens.shape[1]].float().flatten(0, 1)[guessed]
    words = heads.word(states) @ word_embeddings.T + heads.word_bias
    matching, match = heads.match(pooled)[both], pairs.match[both].long()
    image = 1 - F.cosine_similarity(heads.image(pooled), pairs.image_target, dim=1)
    text = 1 - F.cosine_similarity(heads.text(pooled), pairs.text_target, dim=1)
    return {
        "match": F.cross_entropy(matching, match),
        "word": F.cross_entropy(words, pairs.tokens.flatten()[guessed]),
        "image": image[~pairs.no_image].mean(),
        "text": text[~pairs.no_text].mean(),
        "match_accuracy": (matching.argmax(1) == match).float().mean(),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, type=Path, help="folder of build_shards.py")
    parser.add_argument("--text", required=True, type=Path, help="folder of build_text.py")
    parser.add_argument("--clip", required=True, type=Path, help="model folder of train_clip.py, before centring")
    parser.add_argument("--cache", type=Path, help="folder to keep decoded images in")
    parser.add_argument("--out", required=True, type=Path, help="model folder to write")
    parser.add_argument("--seconds", type=float, default=150, help="wall clock (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps, instead of seconds: a run that can be repeated")
    parser.add_argument("--batch", type=int, default=1024, help="pairs a step (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="layers, at most the dual encoder's (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="highest (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and draws (default: %(default)s)")
    options = parser.parse_args(arguments)

    device = choose_device()
    data = load_training_set(options.shards, options.text, options.cache, device)
    clip = load_clip(options.clip, device)
    torch.manual_seed(options.seed)  # here, because what is loaded above may draw numbers
    model = build_vilt(clip, options.layers, data.vocabulary, data.end).to(device)
    start_from_clip(model, clip)
    heads = Heads(model.config.hidden_size, clip.config.projection_dim, data.vocabulary + 1).to(device)
    parameters = [*model.parameters(), *heads.parameters()]
    optimiser = torch.optim.AdamW(
        parameters, lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.02, fused=device.type == "cuda"
    )
    forward = torch.compile(fuse) if device.type == "cuda" else fuse
    source, mask_token = PairSource(data, clip, options.batch), data.vocabulary
    word_embeddings = model.embeddings.text_embeddings.word_embeddings.weight
    budget, step = Budget(options.seconds, options.steps), 0
    while (progress := budget.progress(step)) < 1:
        cosine = 0.5 * (1 + math.cos(math.pi * progress)) + 0.002
        set_learning_rate(optimiser, options.learning_rate * min(1, (step + 1) / WARMUP) * cosine)
        pairs = source.draw()
        masked = torch.where(pairs.hidden_word, mask_token, pairs.tokens)
        with mixed_precision(device):
            hidden, pooled = forward(model, masked, pairs.mask, pairs.pixels)
        found = pair_losses(pairs, heads, hidden, pooled.float(), word_embeddings)
        loss = found["match"] + WORD_WEIGHT * found["word"] + REGRESSION_WEIGHT * (found["image"] + found["text"])
        descend(optimiser, loss)
        step += 1
        budget.step_done()
        if step % 200 == 1:
            print(f"step {step}", *(f"{name} {value.item():.3f}" for name, value in found.items()), flush=True)
    save_folder(model, options.text / "tokenizer", options.out)
    print(f"{step} steps, {step * options.batch} pairs, {budget.elapsed():.0f} s")


if __name__ == "__main__":
    main()
