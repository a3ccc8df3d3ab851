"""What to cite: complete over methods, shipped models and the catalogue, and BibTeX that parses."""

import re
from pathlib import Path

import pytest

from fedvl.config import Experiment
from fedvl.data.catalogue import catalogue
from fedvl.methods import method_names
from fedvl.methods.parts.lora_variants import VARIANTS
from fedvl.models import EMBEDDED
from fedvl.report.bibliography import OWN, bibliography, bibtex_of, of_dataset, of_model
from fedvl.version import __version__

ROOT = Path(__file__).parents[2]


def experiment(method="linear", model="fedvl-tiny", dataset="cifar10-mini", **options):
    return Experiment.model_validate(
        {"method": {"name": method, **options}, "model": {"name": model}, "data": {"dataset": dataset}}
    )


def keys_in(text):
    return re.findall(r"^@[a-z]+\{(.+),$", text, flags=re.MULTILINE)


def test_every_method_shipped_model_and_dataset_has_an_entry_or_a_reason():
    found = bibliography()
    assert set(found.methods) == set(method_names())
    assert set(found.datasets) == set(catalogue())
    assert set(EMBEDDED) <= set(found.models)
    sources = [*found.methods.values(), *found.models.values(), *found.datasets.values()]
    assert all(source.keys or source.note for source in sources)
    named = {key for source in sources for key in (*source.keys, *(k for v in source.variants.values() for k in v))}
    assert named | {OWN} == set(found.publications)  # none is missing, and none is left over


def test_the_variants_are_those_of_the_method_with_its_default_first():
    from fedvl.methods.fedlora import FedLoRAOptions

    variants = bibliography().methods["fedlora"].variants
    assert set(variants) == set(VARIANTS)
    assert next(iter(variants)) == FedLoRAOptions().variant


def test_keys_are_unique_for_bibtex_and_braces_balance():
    found = bibliography().publications
    assert len({key.lower() for key in found}) == len(found)
    for key, one in found.items():
        text = one.bibtex(key)
        depth = 0
        for letter in text:
            depth += (letter == "{") - (letter == "}")
            assert depth >= 0, key
        assert depth == 0, key
        assert text.isascii(), f"{key}: BibTeX 0.99 reads ASCII"
        assert key == OWN or str(one.year) in key, f"{key} is of {one.year}"


def test_an_entry_says_where_it_appeared():
    for key, one in bibliography().publications.items():
        places = {
            "article": one.journal,
            "inproceedings": one.booktitle,
            "techreport": one.institution,
            "misc": one.arxiv or one.note,
            "software": one.version,
        }
        assert places[one.kind], key
        assert one.arxiv is None or re.fullmatch(r"\d{4}\.\d{4,5}", one.arxiv), key
        assert one.doi is None or re.fullmatch(r"10\.\d{4,5}/\S+", one.doi), key


def test_the_entry_of_fedvl_is_that_of_the_readme():
    own = bibliography().publications[OWN]
    assert own.version == __version__
    assert f"```bibtex\n{own.bibtex(OWN)}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_an_entry_of_bibtex_by_hand():
    assert bibliography().publications["he2025afl"].bibtex("he2025afl") == (
        "@inproceedings{he2025afl,\n"
        "  title         = {{AFL}: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models},\n"
        "  author        = {He, Run and others},\n"
        "  booktitle     = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},\n"
        "  year          = {2025},\n"
        "  eprint        = {2405.16240},\n"
        "  archiveprefix = {arXiv}\n"
        "}"
    )


def test_several_runs_cite_each_entry_once_and_fedvl_last():
    text = bibtex_of(
        [
            experiment("linear", "openai/clip-vit-base-patch32", "cifar10+food101"),
            experiment("promptprox", "openai/clip-vit-base-patch32", "cifar100"),
        ]
    )
    assert keys_in(text) == [
        "mcmahan2017fedavg",
        "radford2021clip",
        "krizhevsky2009cifar",
        "bossard2014food101",
        "guo2023promptfl",
        "li2020fedprox",
        OWN,
    ]
    assert "%" not in text


def test_what_has_no_entry_is_named_once_in_a_comment():
    runs = [experiment("mine.py", "models/own-weights.safetensors", "photos/")] * 2
    text = bibtex_of(runs)
    assert keys_in(text) == [OWN]
    assert [line for line in text.splitlines() if line.startswith("%")] == [
        "% mine is a method of your own; cite it as you published it.",
        "% There is no entry for the model own-weights.safetensors; cite it as its authors ask.",
        "% There is no entry for the data photos; cite it as its authors ask.",
    ]


@pytest.mark.parametrize(
    "options, key", [({}, "zhang2024fedit"), ({"variant": "flora"}, "wang2024flora")], ids=["default", "named"]
)
def test_the_variant_decides_the_entry(options, key):
    assert keys_in(bibtex_of([experiment("fedlora", **options)]))[:2] == ["hu2022lora", key]


@pytest.mark.parametrize(
    "name, keys",
    [
        ("openai/clip-vit-large-patch14", ("radford2021clip",)),
        ("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", ("cherti2023openclip", "radford2021clip")),
        ("google/siglip2-base-patch16-224", ("tschannen2025siglip2",)),
        ("google/siglip-base-patch16-224", ("zhai2023siglip",)),
        ("microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224", ("zhang2023biomedclip",)),
        ("dandelin/vilt-b32-mlm", ("kim2021vilt",)),
        ("fedvl-tiny-vilt", ()),
    ],
)
def test_models_are_known_by_a_part_of_their_name(name, keys):
    assert of_model(name).keys == keys


def test_only_the_end_of_a_path_names_a_model():
    assert "no entry" in of_model("/home/vilt/models/own/weights.safetensors").note


def test_datasets_are_known_in_any_spelling_and_as_copies():
    assert (
        of_dataset("hf:flwrlabs/office-home").keys == of_dataset("OfficeHome").keys == ("venkateswara2017officehome",)
    )
    assert "licence" in of_dataset("emoji-mini").note
