"""How the numbers of progress lines go: a loss that leaps and comes back, steps that became slower or faster.

A log shows what its writer chose to print, often smoothed and every tenth step, so the rules want more than those of a
recording: a leap must be far outside of everything before it and be over soon. A change of pace is a note, not a
finding: a log does not say what work the steps did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from dtobs.findings import Confidence, Finding
from dtobs.logs.evidence import Track
from dtobs.words import duration_text, significant

_BEFORE, _AFTER, _LEAST_AFTER = 48, 16, 6
_SCATTERS, _TIMES, _BEYOND = 12.0, 1.5, 3.0
"""A leap is so many times the usual scatter, so many times the usual loss, and so many times the largest one before."""
_LONG_BEFORE = 256
_EARLY, _LATE, _WARM_UP, _FEWEST = 64, 32, 8, 24
_SLOWER = 1.3

Told = tuple[int, float, str]
"""A step, a number, and the line that tells it."""


def spikes(tracks: Mapping[int | None, Track]) -> list[Finding]:
    """The largest leap of the loss, of whichever rank prints it."""
    found = [(leap, track) for track in tracks.values() if (leap := _leap(_advancing(track.losses))) is not None]
    if not found:
        return []
    (usual, (step, loss, where)), track = max(found, key=lambda one: one[0][1][1] / one[0][0])
    at = track.at(step)
    record = {"what": f"the loss of {at} is {significant(loss)}, before it about {significant(usual)}", "where": where}
    text = f"the loss leapt to {significant(loss)} in {at}, from about {significant(usual)}, and came back"
    told = None if track.counted else step
    return [Finding("loss-spike", text, (), Confidence.LIKELY, step=told, evidence=(record,))]


def paces(tracks: Mapping[int | None, Track]) -> list[str]:
    """A note where steps take longer, or less, than they did earlier in the same log."""
    for track in tracks.values():
        seconds = [(step, value) for step, value, _ in _advancing(track.seconds) if value > 0][_WARM_UP:]
        if len(seconds) < _FEWEST:
            continue
        third = len(seconds) // 3
        early = sorted(value for _, value in seconds[: min(_EARLY, third)])
        late = sorted(value for _, value in seconds[-min(_LATE, third) :])
        was, now = median(early), median(late)
        apart = late[len(late) // 4] > early[-len(early) // 10] or late[-len(late) // 4] < early[len(early) // 10]
        if apart and max(now / was, was / now) >= _SLOWER:
            since = _since(seconds, was, now)
            return [f"a step takes {duration_text(now)} since about step {since}, before {duration_text(was)}"]
    return []


def _since(seconds: Sequence[tuple[int, float]], was: float, now: float) -> int:
    """The step from which on most steps are nearer to the present pace."""
    middle = math.sqrt(was * now)
    nearer = [(value > middle) == (now > middle) for _, value in seconds]
    best, score, at = 0, 0, len(nearer)
    for index in range(len(nearer) - 1, -1, -1):
        score += 1 if nearer[index] else -1
        if score >= best:
            best, at = score, index
    return seconds[min(at, len(seconds) - 1)][0]


def _advancing(told: Sequence[Told]) -> list[Told]:
    """The last stretch in which steps only grow: an attempt that began again does not count with the one before."""
    found: list[Told] = []
    for one in told:
        if found and one[0] < found[-1][0]:
            found = []
        found.append(one)
    return found


def _leap(losses: Sequence[Told]) -> tuple[float, Told] | None:
    """The largest leap with the usual loss before it."""
    finite = [one for one in losses if math.isfinite(one[1])]
    worst: tuple[float, Told] | None = None
    for at in range(_BEFORE, len(finite) - _LEAST_AFTER):
        loss = finite[at][1]
        before = [one[1] for one in finite[at - _BEFORE : at]]
        usual = median(before)
        if usual <= 0 or loss <= usual * _TIMES or loss <= max(before):
            continue
        scatter = median(abs(value - usual) for value in before)
        highest = max(one[1] for one in finite[max(0, at - _LONG_BEFORE) : at])
        later = [one[1] for one in finite[at + 1 : at + 1 + _AFTER]]
        far = loss - usual > max(_SCATTERS * scatter, _BEYOND * (highest - usual))
        back = sorted(later)[len(later) // 2] <= usual + (loss - usual) / 4
        if far and back and (worst is None or loss / usual > worst[1][1] / worst[0]):
            worst = usual, finite[at]
    return worst
