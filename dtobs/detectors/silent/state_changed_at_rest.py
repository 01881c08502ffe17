"""state-changed-at-rest: between two steps something other than the optimizer wrote to what only it may write.

What it does: compares small windows of each parameter and its moments as the optimizer left them with what it finds at
its next step, bit for bit, and sums of the words of larger pieces. Much may change them on purpose, alike on all
replicas: averages that are swapped in, clamps, masks, a state that is loaded. So named are ranks whose replicas had the
same numbers and did not change them, and single moments, or single bits (a sum that is off by a power of two), that
changed alone. ``session.policy(at_rest="same")`` says that nothing may change them: then every change is named.

Why it hurts: memory that flips bits, or a copy of the model that one rank only overwrites: it trains something else.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dtobs.detectors.peers import outliers
from dtobs.detectors.silent.audit import Audit, audits, copies
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text

LEAST_LOOKS = 8
FLIPS = 2
"""Elements of a window that a failing memory changes at once."""
HARMLESS_BITS = 4
"""Lowest bits of a parameter whose change a clamp explains as well."""
LEAST_SUMMED = 256
"""Bytes: a scalar that is doubled on purpose changes by one bit, too."""
_PARTS = ("values", "first moment", "second moment")


def state_changed_at_rest(view: RunView) -> list[Finding]:
    """One finding: what replicas prove, or else what was declared, or else what no program does."""
    found = audits(view)
    for way in (_replicas(view, found), _declared(view, found), _alone(found), _one_bit(found)):
        first = next(way, None)
        if first is not None:
            return [first]
    return []


def _replicas(view: RunView, found: list[Audit]) -> Iterator[Finding]:
    for name, _, windows in copies(view, found):
        if len({audit.after[n].tobytes() for audit, n in windows}) > 1:
            continue
        kept = {audit.rank: audit.rest[n].tobytes() for audit, n in windows}
        if len(set(kept.values())) == 1:
            continue
        odd, majority = outliers(kept)
        if not majority:  # of two, the one that has changed what the other left alone
            changed = [audit.rank for audit, n in windows if audit.changed_at_rest[n].any()]
            odd = changed or odd
        audit, n = next((a, n) for a, n in windows if a.rank == odd[0])
        yield _finding(audit, n, odd, f"{ranks_text(odd)} changed the [] of {name}", ", and their replicas did not")


def _declared(view: RunView, found: list[Audit]) -> Iterator[Finding]:
    for audit in found:
        if view.meta(audit.rank).policy.get("at_rest") == "same":
            for n in np.flatnonzero(audit.changed_at_rest.any(axis=(1, 2))):
                said = f"{ranks_text([audit.rank])} changed the [] of {audit.name(int(n))}"
                yield _finding(audit, int(n), [audit.rank], said, "; nothing was to change there")


def _alone(found: list[Audit]) -> Iterator[Finding]:
    """Few elements of the moments, once, with the parameter as it was: no program writes so little."""
    for audit in found:
        changed = audit.changed_at_rest
        any_ = changed.any(axis=(1, 2))
        if any_.sum() != 1 or len(audit) <= LEAST_LOOKS:
            continue
        n = int(np.flatnonzero(any_)[0])
        places = changed[n, 1:].any(axis=0)
        enough = audit.records["count"][n] >= 8 * FLIPS
        if enough and not changed[n, 0].any() and places.sum() <= FLIPS and (audit.rest[n, 1:, places] != 0).all():
            said = (
                f"{count(int(places.sum()), 'element')} of {audit.name(n)}'s [] changed on {ranks_text([audit.rank])}"
            )
            yield _finding(audit, n, [audit.rank], said, ", and nothing else did", Confidence.LIKELY)


def _one_bit(found: list[Audit]) -> Iterator[Finding]:
    """One bit of one element, once, in all that was summed: a program that writes changes more, or again."""
    for audit in found:
        changed = np.argwhere(audit.drifted)
        if len(changed) != 1 or len(audit) <= LEAST_LOOKS:
            continue
        n, part = map(int, changed[0])
        bit, (width, mantissa) = audit.flipped_bit(n, part), audit.bits(n)
        if bit is None or audit.records["summed"][n] < LEAST_SUMMED:
            continue
        if np.delete(audit.changed_at_rest, n, 0).any() or audit.changed_at_rest[n].any(axis=0).sum() > 1:
            continue
        # A clamp may move one parameter by a roundoff, and abs() change its sign: both are a single bit as well.
        if part == 0 and (bit == width - 1 or bit < HARMLESS_BITS or mantissa < 23):
            continue
        kind = "sign" if bit == width - 1 else "exponent" if bit >= mantissa else "mantissa"
        yield Finding(
            "state-changed-at-rest",
            f"one bit of the {_PARTS[part]} of {audit.name(n)} changed on {ranks_text([audit.rank])} between step"
            f" {int(audit.records['step'][n])} and the next (bit {bit}, of the {kind}), and nothing else did",
            (audit.rank,),
            Confidence.LIKELY,
            step=int(audit.records["step"][n]),
            evidence=(
                {
                    "what": "update audit",
                    "parameter": audit.name(n),
                    "bit": bit,
                    "bytes_summed": int(audit.records["summed"][n]),
                    "looks": len(audit),
                },
            ),
        )


def _finding(
    audit: Audit, n: int, ranks: list[int], said: str, why: str, confidence: Confidence = Confidence.CERTAIN
) -> Finding:
    changed, step = audit.changed_at_rest[n].any(axis=1), int(audit.records["step"][n])
    what = " and ".join(part for part, struck in zip(_PARTS, changed, strict=True) if struck) or "state"
    text = said.replace("[]", what, 1)
    return Finding(
        "state-changed-at-rest",
        f"{text} between step {step} and the next{why}",
        tuple(ranks),
        confidence,
        step=step,
        evidence=(
            {
                "what": "update audit",
                "parameter": audit.name(n),
                "elements": int(audit.changed_at_rest[n].any(axis=0).sum()),
                "of": int(audit.records["count"][n]),
                "first_element": int(audit.records["first"][n]),
            },
        ),
    )
