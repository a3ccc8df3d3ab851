"""What an audit found, made up, for its table and page."""

from typing import Any

from fedvl.audit.finding import CLIENT, SERVER, USER, Finding, Unmeasured
from fedvl.audit.words import NOT_CLAIMED, by_risk, headline


def made_up_audit() -> dict[str, Any]:
    findings = [
        Finding("membership", SERVER, "AUC", 0.77, (0.70, 0.84), 0.5, "Membership can be told."),
        Finding("membership-at-1-percent", SERVER, "TPR", 0.38, (0.31, 0.45), 0.01, "Some are identified."),
        Finding("picture", SERVER, "PSNR", 14.4, (13.0, 15.0), 12.7, "A picture comes out.", unit=" dB"),
        Finding("membership", USER, "AUC", 0.5, (0.45, 0.55), 0.5, "Nothing is found."),
    ]
    return {
        "schema": 2,
        "fedvl_version": "0",
        "method": "linear",
        "dataset": "<b>evil</b>",
        "model": "fedvl-tiny",
        "partition": "iid",
        "clients": 12,
        "audited_clients": 10,
        "images_per_client": 20,
        "rounds": 2,
        "seed": 0,
        "attackers_images": 600,
        "headline": headline([each.as_json() for each in findings]),
        "risks": by_risk([each.as_json() for each in findings]),
        "recommendations": ["Use secure aggregation."],
        "leaves": [
            {
                "in": "update",
                "name": "a.tensor.with.a.long.name.weight",
                "shape": [10, 256],
                "bytes": 10240,
                "masked": False,
                "example": [0.1],
                "examined": ["label-histogram", "membership"],
                "share": 0.25,
                "note": "",
            },
            {
                "in": "update",
                "name": "gist",
                "shape": [4],
                "bytes": 16,
                "masked": False,
                "example": [1.25],
                "examined": [],
                "share": 1.0,
                "note": "",
            },
        ],
        "stays": ["images", "labels"],
        "findings": [each.as_json() for each in findings],
        "unmeasured": [Unmeasured("feature-recovery", CLIENT, "It was not tried.").as_json()],
        "known_seed": "The seed gives all away.",
        "remedies": [],
        "budget": None,
        "epsilon": None,
        "not_claimed": list(NOT_CLAIMED),
        "seconds": 1.0,
    }
