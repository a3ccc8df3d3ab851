"""Zero-shot accuracy and linear probe of a dual encoder on the held-out sets.

As a command it evaluates the images that the model card's table reports (see REPORTED in held_out.py) and writes the
scores as JSON. `Monitor` is the check that train_clip.py makes on the folder of build_dev.py.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import CLIPModel, CLIPTokenizer

from tools.pretrain.build_text import CONTEXT
from tools.pretrain.folders import load_clip
from tools.pretrain.held_out import ENSEMBLE, PLAIN_PROMPT, REPORTED, SET_PROMPTS, read_set
from tools.pretrain.images import model_input, read_pack, read_square

PROBE_STEPS = 400


def percent(hits: torch.Tensor) -> float:
    return round(100 * hits.float().mean().item(), 2)


@torch.no_grad()
def image_features(
    model: CLIPModel, images: Sequence[np.ndarray] | np.ndarray, device: torch.device, batch: int = 256
) -> torch.Tensor:
    """Normalised embeddings of uint8 images."""
    embeddings = []
    for start in range(0, len(images), batch):
        pooled = model.vision_model(pixel_values=model_input(images[start : start + batch], device)).pooler_output
        embeddings.append(F.normalize(model.visual_projection(pooled), dim=1))
    return torch.cat(embeddings)


@torch.no_grad()
def text_features(
    model: CLIPModel, tokenizer: CLIPTokenizer, texts: Sequence[str], device: torch.device
) -> torch.Tensor:
    """Normalised embeddings of texts."""
    tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=CONTEXT, return_tensors="pt").to(device)
    pooled = model.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).pooler_output
    return F.normalize(model.text_projection(pooled), dim=1)


class Classifier:
    """Zero-shot scores of features with known labels."""

    def __init__(self, model: CLIPModel, tokenizer: CLIPTokenizer, names: Sequence[str], device: torch.device) -> None:
        self.model, self.tokenizer, self.names, self.device = model, tokenizer, names, device

    def weights(self, prompt: str) -> torch.Tensor:
        return text_features(self.model, self.tokenizer, [prompt.format(name) for name in self.names], self.device)

    def ensemble(self) -> torch.Tensor:
        """The mean of the embeddings of all prompts of a class."""
        return F.normalize(torch.stack([self.weights(prompt) for prompt in ENSEMBLE]).mean(0), dim=1)

    def scores(self, features: torch.Tensor, labels: torch.Tensor, prompt: str | None) -> dict[str, float]:
        weights = {"plain": self.weights(PLAIN_PROMPT), "ensemble": self.ensemble()}
        if prompt is not None:
            weights["prompt"] = self.weights(prompt)
        return {name: percent((features @ text.T).argmax(1) == labels) for name, text in weights.items()}

    def recall(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """Accuracy within each class under the plain prompt."""
        predicted = (features @ self.weights(PLAIN_PROMPT).T).argmax(1)
        return {
            name: round(percent(predicted[labels == number] == number), 1) for number, name in enumerate(self.names)
        }


def linear_probe(
    features: torch.Tensor, labels: torch.Tensor, test_features: torch.Tensor, test_labels: torch.Tensor, classes: int
) -> float:
    """Accuracy of multinomial logistic regression on standardised features.

    Full-batch Adam from zero with a fixed weight decay: nothing is tuned, so that no test image takes part in a choice.
    """
    mean, deviation = features.mean(0), features.std(0) + 1e-6
    features, test_features = (features - mean) / deviation, (test_features - mean) / deviation
    weight = torch.zeros(features.shape[1], classes, device=features.device, requires_grad=True)
    bias = torch.zeros(classes, device=features.device, requires_grad=True)
    optimiser = torch.optim.Adam([weight, bias], lr=0.02)
    for _ in range(PROBE_STEPS):
        loss = F.cross_entropy(features @ weight + bias, labels) + 1e-3 * weight.pow(2).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return percent((test_features @ weight + bias).argmax(1) == test_labels)


def retrieval(images: torch.Tensor, texts: torch.Tensor) -> dict[str, float]:
    """Text to image: how often image i is the best, or among the best five, for text i."""
    similarity = images @ texts.T
    own = torch.arange(len(images), device=images.device)
    best = similarity.topk(min(5, len(images)), 0).indices == own[None]
    return {"t2i_R1": percent(best[0]), "t2i_R5": percent(best.any(0))}


class Monitor:
    """The folder of build_dev.py, decoded once."""

    def __init__(self, folder: Path) -> None:
        self.sets = json.loads((folder / "sets.json").read_text())
        self.images, labels = read_pack(folder)
        self.labels = torch.from_numpy(labels).long()

    def scores(self, model: CLIPModel, tokenizer: CLIPTokenizer, device: torch.device) -> dict[str, dict]:
        features, labels = image_features(model, self.images, device, 1024), self.labels.to(device)
        scores: dict[str, dict] = {}
        for name, (first, last) in self.sets["range"].items():
            part, truth = features[first:last], labels[first:last]
            if name == "flickr_test":
                scores[name] = retrieval(part, text_features(model, tokenizer, self.sets["captions"], device))
                continue
            classifier = Classifier(model, tokenizer, self.sets["names"][name], device)
            scores[name] = classifier.scores(part, truth, SET_PROMPTS.get(name))
            if name == "cifar10":
                half = len(part) // 2
                scores[name]["per_class"] = classifier.recall(part, truth)
                scores[name]["probe"] = linear_probe(
                    part[:half], truth[:half], part[half:], truth[half:], len(classifier.names)
                )
        return scores


def evaluate_set(model: CLIPModel, tokenizer: CLIPTokenizer, data: Path, name: str, probe_images: int) -> dict:
    """Scores on the images of one set that the model card reports; CIFAR-10 gets a linear probe as well."""
    device = torch.device("cpu")
    images = read_set(data, name)
    split, every = REPORTED[name]

    def encoded(rows: Sequence[tuple]) -> tuple[torch.Tensor, torch.Tensor]:
        features = image_features(model, [read_square(source) for source, _ in rows], device)
        return features, torch.tensor([label for _, label in rows])

    features, labels = encoded(images.rows(split)[::every])
    classifier = Classifier(model, tokenizer, images.class_names, device)
    scores: dict = {"n": len(labels), "classes": len(images.class_names)}
    scores |= classifier.scores(features, labels, SET_PROMPTS.get(name))
    if name == "cifar10":
        scores["per_class"] = classifier.recall(features, labels)
        train_features, train_labels = encoded(images.rows("train")[:probe_images])
        scores[f"linear_probe_{probe_images}"] = linear_probe(
            train_features, train_labels, features, labels, len(images.class_names)
        )
    return scores


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="model folder")
    parser.add_argument("--data", required=True, type=Path, help="folder of the sets (see sources.py)")
    parser.add_argument("--sets", nargs="+", choices=list(REPORTED), default=list(REPORTED), help="default: all")
    parser.add_argument("--probe-images", type=int, default=10000, help="CIFAR-10 train images (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results.json"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    model, tokenizer = load_clip(options.model), CLIPTokenizer.from_pretrained(options.model)
    scores = {}
    for name in options.sets:
        scores[name] = evaluate_set(model, tokenizer, options.data, name, options.probe_images)
        print(name, scores[name], flush=True)
        options.out.write_text(json.dumps(scores, indent=1))


if __name__ == "__main__":
    main()
