"""Membership by replay: the attack that applies to every method, since its code is known.

The attacker computes with the method's own code what a client would send with and without a
candidate image, for every tensor and number that leaves: shared tensors, trained or not, sent
tensors, reports, weight, loss, number of examples, and the lowest bits of all of them. It looks for
that difference in the message by scores that know nothing of the method (``scores.py``): along it,
along it after whitening, in the space that rows or columns span (leverage), as a row, and as single
numbers.
"""

from fedvl.audit.evidence import Evidence
from fedvl.audit.finding import CLIENT, SERVER, USER, Outcome, Unmeasured
from fedvl.audit.membership import judge_view, trained_names, why_no_updates

NAMES = ("membership-replay", "membership-replay-at-1-percent")


def attack(evidence: Evidence) -> list[Outcome]:
    found = judge_view(evidence, NAMES, SERVER, evidence.seen_by_server(), None)
    seen = evidence.seen_by_client()
    if not seen:
        found.append(Unmeasured(NAMES[0], CLIENT, why_no_updates(CLIENT)))
    elif set(trained_names(evidence, seen[0])) == set(seen[0].change):
        sentence = "Another client sees trained tensors alone, in which the attack 'membership' looks for images."
        found.append(Unmeasured(NAMES[0], CLIENT, sentence))
    else:
        found += judge_view(evidence, NAMES, CLIENT, seen, None)
    return [
        *found,
        Unmeasured(NAMES[0], USER, "A user sees predictions alone; the attack 'membership' looks at these."),
    ]
