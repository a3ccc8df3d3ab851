"""What an audit found, made up, for its table and page."""

from typing import Any

from fedvl.audit.finding import CLIENT, SERVER, USER, Audit, Epsilon, Finding, Leaving, Unmeasured
from fedvl.audit.words import NOT_CLAIMED, by_risk, changes_of, headline
from fedvl.config import Experiment


def made_up_audit() -> Audit:
    findings = [
        Finding("membership", SERVER, "AUC", 0.77, (0.70, 0.84), 0.5, "Membership can be told."),
        Finding("membership-at-1-percent", SERVER, "TPR", 0.38, (0.31, 0.45), 0.01, "Some are identified."),
        Finding("picture", SERVER, "PSNR", 14.4, (13.0, 15.0), 12.7, "A picture comes out.", unit=" dB"),
        Finding("membership", USER, "AUC", 0.5, (0.45, 0.55), 0.5, "Nothing is found."),
    ]
    kept = {"masked": False, "note": ""}
    name = "a.tensor.with.a.long.name.weight"
    leaves = [
        {"in": "update", "name": name, "shape": [10, 256], "bytes": 10240, "example": [0.1], "share": 0.25, **kept}
        | {"examined": ["label-histogram", "membership"]},
        {"in": "update", "name": "gist", "shape": [4], "bytes": 16, "example": [1.25], "share": 1.0, **kept}
        | {"examined": []},
    ]
    return Audit(
        version=2,
        fedvl_version="0",
        method="linear",
        dataset="<b>evil</b>",
        model="fedvl-tiny",
        partition="iid",
        clients=12,
        audited_clients=10,
        images_per_client=20,
        rounds=2,
        seed=0,
        attackers_images=600,
        headline=headline(findings),
        risks=by_risk(findings),
        recommendations=["Use secure aggregation."],
        leaves=[Leaving.model_validate(row) for row in leaves],
        stays=["images", "labels"],
        findings=findings,
        unmeasured=[Unmeasured("feature-recovery", CLIENT, "It was not tried.")],
        known_seed="The seed gives all away.",
        remedies=[],
        budget=None,
        epsilon=None,
        not_claimed=list(NOT_CLAIMED),
        seconds=1.0,
        made="2026-03-04T05:06:07+00:00",
        participants="12 simulated clients",
        changes=changes_of(findings, Experiment()),
        state_sha256="a" * 64,
        settings_sha256="b" * 64,
    )


def made_up_epsilon(**more: Any) -> Epsilon:
    found = {"unit": "record", "claimed": 3.0, "delta": 1e-5, "spent": 3.0, "rounds": 1, "bound": 4.0, "most": 9.0}
    found |= {"confidence": 0.95, "canaries": 9, "guesses": 9, "right": 9, "violated": True, "sentence": "Claimed: 3."}
    return Epsilon.model_validate(found | more)
