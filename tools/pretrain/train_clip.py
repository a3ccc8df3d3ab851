"""Pretrain the tiny dual encoder from labelled images, captions and two frozen teachers.

Stage A teaches the text tower alone what words mean; stage B trains both towers together. The losses of stage B, where
f is an image embedding and g a text embedding, both normalised:
  class     every image against about half of the concepts, a random sentence each; all ancestors of the label count
            as positives, each competes with the negatives only, and the logits are adjusted by the concepts' priors
  to_image  the same logits read from text to image
  caption   CLIP's loss on Flickr8k pairs
  teacher   the image teacher's ImageNet distribution against logits made from the class names
  ancestor  the same, summed up the WordNet hierarchy
  feature   cosine to the image teacher's pooled feature
  open      the image among random WordNet words: where would the sentence teacher put its label or caption?
  text      the text tower keeps the geometry of the semantic vectors on words, glosses and captions
Writes OUT as a model folder (averaged weights, fp16), OUT/train_log.json and, with --dev, OUT/dev.json.
"""

import argparse
import copy
import json
import math
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch
from transformers import CLIPModel, CLIPTokenizer

from tools.pretrain.evaluate import Monitor
from tools.pretrain.folders import save_folder
from tools.pretrain.learner import LOSS_WEIGHTS, MAX_SCALE, Learner, Settings
from tools.pretrain.runtime import Budget, choose_device, descend, set_learning_rate
from tools.pretrain.teachers import load_image_teacher
from tools.pretrain.training_set import load_meanings, load_training_set

TEXT_STAGE_WARMUP = 100
LOWEST_RATE = 0.005  # of the learning rate, at the end
MAX_HISTORY = 200


def text_stage(learner: Learner) -> int:
    """Stage A: the text tower learns the meanings alone. Returns the number of steps."""
    settings = learner.settings
    budget, step = Budget(settings.text_seconds, settings.text_steps), 0
    while budget.progress(step) < 1:
        set_learning_rate(learner.optimiser, settings.learning_rate * min(1, (step + 1) / TEXT_STAGE_WARMUP))
        tokens, meaning = learner.draw_items(settings.text_batch)
        loss = learner.heads.text_loss(learner.encode_texts(tokens), meaning)
        descend(learner.optimiser, loss)
        step += 1
        budget.step_done()
        if step % 200 == 1:
            print(f"text step {step}: loss {loss.item():.4f}", flush=True)
    return step


class Run:
    """Stage B, its history, and the running average of the weights that is the result."""

    def __init__(self, learner: Learner, text: Path, dev: Path | None, out: Path) -> None:
        self.learner, self.settings = learner, learner.settings
        self.text, self.out = text, out
        self.monitor = Monitor(dev) if dev else None
        self.average = copy.deepcopy(learner.model).requires_grad_(False)
        self.budget = Budget(self.settings.seconds, self.settings.steps)
        self.step, self.seen = 0, 0
        self.history: list[dict[str, float]] = []

    def learning_rate(self, progress: float) -> float:
        """Linear warm-up by steps times a cosine over the budget."""
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        warm = min(1.0, (self.step + 1) / self.settings.warmup)
        return self.settings.learning_rate * warm * (cosine * (1 - LOWEST_RATE) + LOWEST_RATE)

    def train(self) -> None:
        settings, learner, checks_done = self.settings, self.learner, 0
        while (progress := self.budget.progress(self.step)) < 1:
            if checks_done < settings.checks and progress > (checks_done + 1) / (settings.checks + 1):
                checks_done += 1
                self.save()
            set_learning_rate(learner.optimiser, self.learning_rate(progress))
            found = learner.joint_losses(learner.draw())
            loss = sum(LOSS_WEIGHTS[name] * value for name, value in found.items())
            descend(learner.optimiser, loss)
            self.update_average()
            self.step += 1
            self.seen += settings.batch + settings.caption_batch
            self.budget.step_done()
            if self.step % settings.log_every == 0:
                self.record(found)

    @torch.no_grad()
    def update_average(self) -> None:
        """Exponential moving average, with a shorter memory over the first steps."""
        keep = min(self.settings.averaging, (1 + self.step) / (10 + self.step))
        averaged, current = list(self.average.parameters()), list(self.learner.model.parameters())
        torch._foreach_lerp_(averaged, current, 1 - keep)

    def record(self, found: dict[str, torch.Tensor]) -> None:
        values = {name: round(value.item(), 3) for name, value in found.items()}
        if not all(math.isfinite(value) for value in values.values()):
            raise SystemExit(f"step {self.step}: a loss is not finite: {values}")
        at = {"step": self.step, "seconds": round(self.budget.elapsed(), 1), "seen": self.seen}
        self.history.append(at | values)
        print(" ".join(f"{name} {value}" for name, value in self.history[-1].items()), flush=True)

    def export(self) -> CLIPModel:
        """The averaged weights as they are shipped: fp16, logit scale at most 100."""
        model = copy.deepcopy(self.average).eval()
        model.logit_scale.data.clamp_(max=math.log(MAX_SCALE))
        save_folder(model, self.text / "tokenizer", self.out)
        return model

    def save(self) -> None:
        model = self.export()
        thinned = self.history[:: max(1, len(self.history) // MAX_HISTORY)]
        log = {
            "settings": asdict(self.settings),
            "steps": self.step,
            "images_seen": self.seen,
            "seconds": round(self.budget.elapsed(), 1),
            "history": thinned,
        }
        (self.out / "train_log.json").write_text(json.dumps(log))
        if self.monitor is not None:
            tokenizer = CLIPTokenizer.from_pretrained(self.out)
            scores = self.monitor.scores(model.float(), tokenizer, self.learner.device)
            (self.out / "dev.json").write_text(json.dumps(scores, indent=1))
            print(f"step {self.step}: {json.dumps(scores)}", flush=True)


HELP = {
    "seconds": "wall clock for stage B",
    "text_seconds": "wall clock for stage A",
    "steps": "steps of stage B, instead of seconds: a run that can be repeated",
    "text_steps": "steps of stage A, instead of seconds",
    "text_batch": "texts a step in stage A",
    "batch": "labelled images a step",
    "caption_batch": "images with captions a step",
    "concepts": "concepts in play a step",
    "words": "random words a step",
    "teacher_size": "pixels that views are enlarged to for the image teacher",
    "teacher_share": "share of the labelled images that the image teacher sees",
    "mixed": "share of the labelled images that are mixed with another",
    "learning_rate": "highest learning rate",
    "weight_decay": "AdamW's weight decay of matrices",
    "warmup": "steps of stage B to reach the learning rate",
    "averaging": "decay of the running average of the weights",
    "vision_width": "width of the vision tower; a multiple of 64",
    "vision_layers": "layers of the vision tower",
    "vision_hidden": "width of the vision tower's MLPs",
    "text_layers": "layers of the text tower",
    "checks": "times that the model so far is written and, with --dev, checked",
    "log_every": "steps between two records of the losses",
    "seed": "seed of the weights and of all draws",
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, type=Path, help="folder of build_shards.py")
    parser.add_argument("--text", required=True, type=Path, help="folder of build_text.py")
    parser.add_argument("--image-teacher", required=True, type=Path, help="safetensors file of ResNet-50 (teachers.py)")
    parser.add_argument("--sentence-teacher", required=True, type=Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--dev", type=Path, help="folder of build_dev.py, to check the model by")
    parser.add_argument("--cache", type=Path, help="folder to keep decoded images and string embeddings in")
    parser.add_argument("--out", required=True, type=Path, help="model folder to write")
    for field in fields(Settings):
        kind = int if isinstance(field.default, int) or field.default is None else float
        flag = "--" + field.name.replace("_", "-")
        text = HELP[field.name] + ("" if field.default is None else " (default: %(default)s)")
        parser.add_argument(flag, type=kind, default=field.default, help=text)
    options = parser.parse_args(arguments)
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})

    begun = time.monotonic()
    device = choose_device()
    data = load_training_set(options.shards, options.text, options.cache, device)
    meanings = load_meanings(data.arrays, options.text, options.sentence_teacher, options.cache, device)
    teacher = load_image_teacher(options.image_teacher, device)
    learner = Learner(settings, data, meanings, teacher)
    size = sum(parameter.numel() for parameter in learner.model.parameters())
    print(f"{len(data.images)} images, {size / 1e6:.2f} M parameters, ready in {time.monotonic() - begun:.0f} s")
    print(f"stage A: {text_stage(learner)} steps", flush=True)
    run = Run(learner, options.text, options.dev, options.out)
    run.train()
    run.save()
    print(f"stage B: {run.step} steps, {run.seen} images, {run.budget.elapsed():.0f} s")


if __name__ == "__main__":
    main()
