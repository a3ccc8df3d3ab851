"""A made-up survey of three sites."""

import numpy as np

from fedvl.data.check import NAMES_OF_BARS, bars
from fedvl.data.faults import FAULT_KINDS
from fedvl.data.survey import FaultAtSites, Survey, SurveyedClass


def made_up_survey(clean: bool = False) -> Survey:
    faults = [("unreadable", 2, 7), ("leak", 1, 0), ("exchanged", 1, 0)]
    return Survey(
        fedvl_version="1",
        surveyed="2026-01-02T03:04:05+00:00",
        secure_sum=clean,
        sites=["east", "north"],
        missing=[] if clean else ["south"],
        refused=[] if clean else ["south: its policy forbids it."],
        images=1200,
        readable=1200 if clean else 1193,
        classes=[
            SurveyedClass(name="Melanoma", train=400, test=100, renamed=0 if clean else 1),
            SurveyedClass(name="naevus", train=600, test=100, renamed=0),
        ],
        rare=[] if clean else ["scar"],
        strangers=0 if clean else 1,
        faults=[]
        if clean
        else [
            FaultAtSites(
                kind=kind, title=FAULT_KINDS[kind].title, fix=FAULT_KINDS[kind].fix, sites=sites, images=images
            )
            for kind, sites, images in faults
        ],
        compared=[],
        alike=[],
        **{key: bars(names, np.arange(1, len(names) + 1)) for key, names in NAMES_OF_BARS.items()},
    )
