"""The dual encoder while it is trained: its settings, the random inputs of a step, and the losses on them."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPConfig, CLIPModel

from tools.pretrain import losses
from tools.pretrain.augment import augment, mix
from tools.pretrain.build_text import CAPTIONS_PER_IMAGE, CONTEXT, ITEM_VARIANTS
from tools.pretrain.images import IMAGE_SIZE, standardise
from tools.pretrain.runtime import mixed_precision
from tools.pretrain.teachers import ResNet50
from tools.pretrain.training_set import Meanings, TrainingSet, label_targets, log_prior, sampling_weights

LOSS_WEIGHTS = {
    "class": 1.0,
    "to_image": 0.7,
    "caption": 0.5,
    "teacher": 1.0,
    "ancestor": 0.02,
    "feature": 2.0,
    "open": 0.5,
    "text": 1.0,
}
TEXT_WIDTH = JOINT_WIDTH = 256
PATCH_SIZE = 8
HEAD_WIDTH = 64
MAX_SCALE = 100.0
CONCEPT_TOKENS = 24  # sentences of concepts are cut to this; only glosses are longer
TEACHER_TEMPERATURE = 1.5
OPEN_TEMPERATURE = 0.06


@dataclass(frozen=True)
class Settings:
    """The shipped run's settings are the defaults."""

    seconds: float = 1230.0
    text_seconds: float = 20.0
    steps: int | None = None
    text_steps: int | None = None
    text_batch: int = 2048
    batch: int = 1536
    caption_batch: int = 96
    concepts: int = 1280
    words: int = 768
    teacher_size: int = 160
    teacher_share: float = 0.4
    mixed: float = 0.5
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.05
    warmup: int = 600
    averaging: float = 0.9995
    vision_width: int = 320
    vision_layers: int = 9
    vision_hidden: int = 960
    text_layers: int = 4
    checks: int = 5
    log_every: int = 50
    seed: int = 0


def build_model(settings: Settings, vocabulary: int, start: int, end: int) -> CLIPModel:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 4 * TEXT_WIDTH,
        "num_hidden_layers": settings.text_layers,
        "num_attention_heads": TEXT_WIDTH // HEAD_WIDTH,
        "max_position_embeddings": CONTEXT,
        "projection_dim": JOINT_WIDTH,
        "hidden_act": "gelu",
        "bos_token_id": start,
        "eos_token_id": end,
        "pad_token_id": end,
    }
    vision = {
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "hidden_size": settings.vision_width,
        "intermediate_size": settings.vision_hidden,
        "num_hidden_layers": settings.vision_layers,
        "num_attention_heads": settings.vision_width // HEAD_WIDTH,
        "projection_dim": JOINT_WIDTH,
        "hidden_act": "gelu",
    }
    scale = math.log(20.0)
    config = CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=JOINT_WIDTH, logit_scale_init_value=scale
    )
    config._attn_implementation = "sdpa"
    return CLIPModel(config)


class Heads(nn.Module):
    """Parameters that are used in training only."""

    def __init__(self, vision_width: int, teacher_width: int, meaning_width: int) -> None:
        super().__init__()
        self.feature = nn.Linear(vision_width, teacher_width)
        self.meaning = nn.Linear(JOINT_WIDTH, meaning_width, bias=False)
        starts = {"teacher": 15.0, "ancestor": 15.0, "open": 10.0, "relation": 12.0}
        self.log_scale = nn.ParameterDict(
            {name: nn.Parameter(torch.tensor(math.log(start))) for name, start in starts.items()}
        )
        self.ancestor_bias = nn.Parameter(torch.tensor(-8.0))

    def scale(self, name: str, largest: float = MAX_SCALE) -> torch.Tensor:
        return self.log_scale[name].exp().clamp(max=largest)

    def text_loss(self, embeddings: torch.Tensor, meanings: torch.Tensor) -> torch.Tensor:
        """The meaning can be read off linearly, and the similarities between texts are those of their meanings."""
        relation = losses.relational_divergence(embeddings, meanings, self.scale("relation", 50.0))
        return losses.cosine_distance(self.meaning(embeddings), meanings) + relation


@dataclass
class Batch:
    """One random step's inputs: the first `settings.batch` views have labels, the rest captions."""

    views: torch.Tensor  # in [0, 1]
    label: torch.Tensor
    partner_label: torch.Tensor  # of the image that each labelled view was mixed with
    own: torch.Tensor  # weight of the view's own image
    concepts: torch.Tensor  # those in play
    concept_tokens: torch.Tensor
    word_tokens: torch.Tensor
    word_meaning: torch.Tensor
    caption_tokens: torch.Tensor
    caption_meaning: torch.Tensor
    teacher_rows: torch.Tensor  # views that the image teacher sees
    teacher_feature: torch.Tensor
    teacher_logits: torch.Tensor


class Learner:
    """The model, its training-only heads, the optimiser, and everything a step draws from."""

    def __init__(self, settings: Settings, data: TrainingSet, meanings: Meanings, teacher: ResNet50) -> None:
        self.settings, self.data, self.meanings = settings, data, meanings
        device = self.device = data.images.device
        class_ancestor = data.arrays.tensor("class_ancestor", torch.float32)
        if class_ancestor.shape[0] != teacher.fc.out_features:
            raise SystemExit("the image teacher and the text folder differ in the number of ImageNet classes")
        self.class_ancestor, self.classes = class_ancestor, class_ancestor.shape[0]
        self.targets = label_targets(data.arrays.tensor("true", torch.bool), data.leaf, class_ancestor)
        self.no_label = len(data.leaf)
        self.label = torch.where(data.label < 0, self.no_label, data.label)
        self.labelled, self.captioned = (index.nonzero().squeeze(1) for index in (data.caption < 0, data.caption >= 0))
        self.item_tokens, self.nouns = data.arrays.tensor("item_tokens", torch.int32), data.arrays.number("nouns")
        label = self.label[self.labelled]
        self.sampling = sampling_weights(label, data.key[self.labelled], data.key_names)
        self.log_prior = log_prior(label, self.sampling, self.targets.weight)
        self.with_teacher = int(settings.teacher_share * settings.batch)

        torch.manual_seed(settings.seed)  # here, because loading a teacher draws numbers, and a cached one does not
        self.model = build_model(settings, data.vocabulary, data.start, data.end).to(device)
        self.heads = Heads(settings.vision_width, teacher.width, meanings.concept.shape[1]).to(device)
        self.vision, self.text, self.teacher = self.model.vision_model, self.model.text_model, teacher
        if device.type == "cuda":
            self.vision, self.text, self.teacher = (
                torch.compile(part) for part in (self.vision, self.text, self.teacher)
            )
        decayed, plain = [], []
        for name, parameter in [*self.model.named_parameters(), *self.heads.named_parameters()]:
            (plain if parameter.ndim < 2 or "embedding" in name else decayed).append(parameter)
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda"
        )

    def encode_images(self, views: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pooled state and normalised embedding."""
        with mixed_precision(self.device):
            pooled = self.vision(pixel_values=standardise(views)).pooler_output
            embedding = self.model.visual_projection(pooled)
        return pooled.float(), F.normalize(embedding.float(), dim=1)

    def encode_texts(self, tokens: torch.Tensor) -> torch.Tensor:
        with mixed_precision(self.device):
            embedding = self.model.text_projection(self.text(input_ids=tokens.long()).pooler_output)
        return F.normalize(embedding.float(), dim=1)

    def _randint(self, low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), device=self.device)

    def draw_items(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and meanings of random texts: two thirds nouns, one third adjectives, verbs, glosses, captions."""
        nouns = 2 * count // 3
        parts = [
            self._randint(0, self.nouns, nouns),
            self._randint(self.nouns, len(self.item_tokens), count - nouns),
        ]
        chosen = torch.cat(parts)
        return self.item_tokens[chosen, self._randint(0, ITEM_VARIANTS, count)], self.meanings.item[chosen]

    @torch.no_grad()
    def draw(self) -> Batch:
        settings, data, device = self.settings, self.data, self.device
        labelled = self.labelled[torch.multinomial(self.sampling, settings.batch, replacement=True)]
        captioned = self.captioned[self._randint(0, len(self.captioned), settings.caption_batch)]
        views = augment(data.images[torch.cat([labelled, captioned])])
        mixed, partner, own = mix(views[: settings.batch], settings.mixed)
        views = torch.cat([mixed, views[settings.batch :]])
        # The teacher sees some of the labelled views and all captioned ones: the very views that the student sees.
        places = torch.arange(len(views), device=device)
        teacher_rows = torch.cat([places[: self.with_teacher], places[settings.batch :]])
        enlarged = F.interpolate(views[teacher_rows], (settings.teacher_size,) * 2, mode="bilinear")
        if device.type == "cuda":
            enlarged = enlarged.to(torch.bfloat16, memory_format=torch.channels_last)
        feature, logits = self.teacher(enlarged)
        label = self.label[labelled]
        concepts = torch.randperm(len(data.concept_tokens), device=device)[: settings.concepts]
        caption, which = data.caption[captioned], self._randint(0, CAPTIONS_PER_IMAGE, settings.caption_batch)
        sentence = self._randint(0, data.concept_tokens.shape[1], len(concepts))
        concept_tokens = data.concept_tokens[concepts, sentence][:, :CONCEPT_TOKENS].clone()
        concept_tokens[:, -1] = data.end
        word_tokens, word_meaning = self.draw_items(settings.words)
        return Batch(
            views=views,
            label=label,
            partner_label=label[partner],
            own=own,
            concepts=concepts,
            concept_tokens=concept_tokens,
            word_tokens=word_tokens,
            word_meaning=word_meaning,
            caption_tokens=data.caption_tokens[caption, which],
            caption_meaning=self.meanings.caption[caption, which],
            teacher_rows=teacher_rows,
            teacher_feature=feature.float(),
            teacher_logits=logits.float(),
        )

    def joint_losses(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The losses of stage B by name, as train_clip.py describes them."""
        settings, heads = self.settings, self.heads
        count, concepts = settings.batch, batch.concepts
        pooled, images = self.encode_images(batch.views)
        concept_texts = self.encode_texts(batch.concept_tokens)
        other_texts = self.encode_texts(torch.cat([batch.word_tokens, batch.caption_tokens]))
        words, captions = other_texts[: settings.words], other_texts[settings.words :]
        scale = self.model.logit_scale.exp().clamp(max=MAX_SCALE)
        own, taught = batch.own[:, None], images[batch.teacher_rows]
        found: dict[str, torch.Tensor] = {}

        logits = scale * images[:count] @ concept_texts.T
        excluded = self.targets.not_negative[batch.label][:, concepts]
        partner_excluded = self.targets.not_negative[batch.partner_label][:, concepts] & (own < losses.PURE)
        weight, partner_weight = (
            losses.share_out(self.targets.weight[label][:, concepts]) for label in (batch.label, batch.partner_label)
        )
        found["class"] = losses.multi_positive_contrast(
            logits,
            self.log_prior[concepts],
            excluded | partner_excluded,
            own * weight + (1 - own) * partner_weight,
        )

        pure = ((batch.own > losses.PURE) & (batch.label < self.no_label))[:, None]  # mixed images are left out here
        positive = self.targets.true[batch.label][:, concepts] & pure
        found["to_image"] = losses.text_to_image_contrast(logits, positive, excluded | ~pure)

        found["caption"] = losses.pair_contrast(scale * images[count:] @ captions.T)

        is_class = concepts < self.classes
        found["teacher"] = losses.divergence(
            batch.teacher_logits[:, concepts[is_class]] / TEACHER_TEMPERATURE,
            heads.scale("teacher") * taught @ concept_texts[is_class].T,
        )
        probability = batch.teacher_logits.softmax(1)
        found["ancestor"] = losses.ancestor_cross_entropy(
            heads.scale("ancestor") * taught @ concept_texts.T + heads.ancestor_bias,
            (probability @ self.class_ancestor[:, concepts]).clamp(0, 1),
        )
        found["feature"] = losses.cosine_distance(heads.feature(pooled[batch.teacher_rows]), batch.teacher_feature)
        found["open"] = losses.divergence(
            self.image_meaning(batch, probability) @ batch.word_meaning.T / OPEN_TEMPERATURE,
            heads.scale("open") * taught @ words.T,
        )
        found["text"] = heads.text_loss(
            torch.cat([words, concept_texts]), torch.cat([batch.word_meaning, self.meanings.concept[concepts]])
        )
        return found

    @torch.no_grad()
    def image_meaning(self, batch: Batch, probability: torch.Tensor) -> torch.Tensor:
        """Where an image lies among meanings: at its label (mixed as its pixels are) or caption, and, by half as much,
        where the image teacher sees it."""

        def of_label(label: torch.Tensor) -> torch.Tensor:
            meaning = self.meanings.concept[self.data.leaf[label.clamp(max=self.no_label - 1)]]
            return meaning * (label < self.no_label).float()[:, None]

        first = slice(self.with_teacher)
        own = batch.own[first, None]
        labelled = own * of_label(batch.label[first]) + (1 - own) * of_label(batch.partner_label[first])
        seen = F.normalize(probability @ self.meanings.concept[: self.classes], dim=1)
        return F.normalize(torch.cat([labelled, batch.caption_meaning]) + 0.5 * seen, dim=1)
