"""Runs the detectors on the evidence, adds what the monitor saw while the run lived, and ranks the causes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from dtobs.detectors import hangs, run_detectors
from dtobs.detectors.comparisons import comparisons_off
from dtobs.detectors.hangs.describe import waiters, waits_there, where
from dtobs.detectors.hangs.endings import End, all_told, endings
from dtobs.detectors.hangs.situation import LEFT, interpret
from dtobs.detectors.hangs.stall import Stall, finished, last_movement_ns, moved_on, quiet_period
from dtobs.detectors.silent.loss_weights import divided_twice
from dtobs.detectors.silent.ranks_apart import ranks_apart
from dtobs.detectors.silent.replica_divergence import COUNTED
from dtobs.diagnose.gather import Evidence
from dtobs.diagnose.model import Diagnosis
from dtobs.diagnose.run_pictures import run_pictures
from dtobs.diagnose.status import statuses
from dtobs.events import RankState
from dtobs.findings import CATALOGUE, Confidence, Finding, Severity, Trait
from dtobs.host.process import ProcessState
from dtobs.host.stacks import in_library
from dtobs.recording.arrivals import read_arrivals
from dtobs.recording.journal import Entry
from dtobs.recording.rank import END_SIGNALS
from dtobs.recording.rundir import command_failed, total_steps
from dtobs.recording.summary import summarise
from dtobs.recording.view import RunView
from dtobs.words import duration_text, ranks_do, ranks_text

_NOTICED_SECONDS = 5.0
_MAX_PAST = 5
_SEEN_LATER_STEPS = 64
_OF_UPDATES = ("optimizer", "learning rate")
"""Settings that make copies part although they get equal gradients."""
_OF_MODES = ("batch norm", "dropout and batch-norm layers in training mode")
"""Settings with which batch norms count other numbers of batches."""
_OF_BEGINNINGS = {
    ("seed-policy", "initial parameters"),
    ("resume-mismatch", "optimizer state"),
    ("resume-mismatch", "optimizer's steps"),
}
"""What copies begin with, by code and aspect, that makes them part."""
_ABOUT_NUMBERS = re.compile(r"\bnan\b|\binf\b|non-?finite|infinity|overflow", re.IGNORECASE)


def diagnose(evidence: Evidence) -> Diagnosis:
    """The diagnosis of what was gathered."""
    view = evidence.view
    seen = [] if evidence.judged else run_detectors(view)
    still = {finding.key for finding in seen}
    gone_on = [e for e in evidence.journal if e.finding.key not in still and _went_on(view, e)]
    before = [e for e in evidence.journal if e not in gone_on]
    if not any(entry.finding.traits & Trait.HANG for entry in before):
        before += _stood_in(view)
    found, caused = without_consequences(merge(seen, before), before, _working(view), _left_silently(view))
    ordered = rank_causes(as_it_ended(view, finding) for finding in found)
    quiet, ranks = quiet_period(view), statuses(view)
    spent = summarise(view) if len(view.pages) and not evidence.judged else None
    notes = []
    lives = any(process.alive for process in view.processes.values())
    told = quiet is not None and quiet.exceeded and bool(ordered)  # the verdict says it
    if quiet is not None and not told and quiet.seconds > _NOTICED_SECONDS and (lives or not view.processes):
        notes.append(_lingering(view, quiet) or _pause(view, quiet))
    notes += [f"what came after it: {finding.summary}" for finding in caused]
    notes += _stood_until_the_end(view, ordered)
    if len(view.pages) and not caused and (ended := _ended_from_outside(view)):
        notes.append(ended)
    notes += _left_by_themselves(view) if len(view.pages) and not ordered else []
    if not ordered and not any(ending.told for ending in endings(view).values()):
        notes += _failed(view)
    notes += _unwatched(view)
    notes += spent.lines() if spent is not None and spent.settled else []
    if len(view.pages):
        notes += [*(off.text for off in comparisons_off(view)), *ranks_apart(view), *divided_twice(view)]
    over = [*evidence.past, *(e for e in gone_on if not e.finding.early)]
    notes += [*dict.fromkeys(view.damaged), *map(_past, over[-_MAX_PAST:])]
    return Diagnosis(
        target=evidence.target,
        world_size=view.world_size,
        verdict=ordered[0] if ordered else None,
        findings=tuple(ordered),
        ranks=ranks,
        missing_ranks=tuple(view.missing_ranks) if len(view.pages) else (),
        notes=tuple(notes),
        pictures=run_pictures(view, ordered, ranks),
    )


def merge(now: Iterable[Finding], journal: Iterable[Entry]) -> list[Finding]:
    """What is seen now, and what was seen live and has scrolled away since; the same matter once, since it began.

    The surer of two views of it wins; guesses of the moment give way to what explains the end now.
    """
    found = {finding.key: finding for finding in now}
    ended = any(Trait.ENDING in finding.traits for finding in found.values())
    explained = any(CATALOGUE[code].family == "hangs" for code, *_ in found)
    for entry in journal:
        earlier = entry.finding
        same = found.get(earlier.key)
        if same is None and (
            _outgrown(earlier, found.values())
            or _first_sign(earlier, found.values())
            or _before_the_capture(earlier, found.values())
            or (explained and _only_possible(earlier) and not (earlier.early and ended))
            or (_merely_gone(earlier) and earlier.confidence is not Confidence.CERTAIN)
        ):
            continue
        if same is None or earlier.confidence.order > same.confidence.order or (same.early and not earlier.early):
            found[earlier.key] = earlier
        elif earlier.confidence is same.confidence and _says_where(earlier) and not _says_where(same):
            found[earlier.key] = earlier  # the process is gone or on its way out, and no stack tells any more
        elif earlier.since_ns and (not same.since_ns or earlier.since_ns < same.since_ns):
            found[earlier.key] = replace(same, since_ns=earlier.since_ns)
    return list(found.values())


def _stood_in(view: RunView) -> list[Entry]:
    """What the run stood in when its ranks were ended, though no monitor wrote it down.

    The look is at the last moment at which all were seen alive. A program that heard the signal to end may have spent
    its last seconds on that, so nothing is said of it.
    """
    if not len(view.pages) or any(view.signals(rank) & END_SIGNALS for rank in view.ranks):
        return []
    ended = [view.process(rank) for rank in view.ranks]
    seen = [process.alive_ns if process is not None and not process.alive else 0 for process in ended]
    moment = min(seen)
    if not moment or last_movement_ns(view) >= moment:
        return []
    living = {rank: ProcessState(int(view.page(rank)["pid"]), alive=True) for rank in view.ranks}
    then = replace(view, now_ns=moment, processes=living, capture=None, asked=True, _windows={})
    found = [f for f in hangs.detect(then) if f.traits & Trait.HANG]
    return [Entry("standing" if f.early else "found", "", moment, view.attempt, f) for f in found]


def _went_on(view: RunView, entry: Entry) -> bool:
    """Whether the run trained on after a hang was found, so that the hang is over though nobody has said so yet.

    What every rank does counts, and no single call: a handler of the interruption may issue one. Where others went on
    all the time, the ranks that are named have to do something as well.
    """
    passing = Trait.RECOVERABLE in entry.finding.traits or entry.finding.early
    named = set(entry.finding.ranks) & set(view.ranks)
    if named and last_movement_ns(view.without(set(view.ranks) - named)) <= entry.t_ns:
        return False
    return passing and (moved_on(view, entry.t_ns) or finished(view, entry.finding, entry.t_ns))


def without_consequences(
    found: Iterable[Finding],
    journal: Iterable[Entry],
    world: Collection[int],
    silent: Mapping[int, int] = MappingProxyType({}),
) -> tuple[list[Finding], list[Finding]]:
    """The findings, and apart from them those that a hang or its end by somebody's hand brought about.

    A hang that was there is the matter; that its ranks were killed later, or called something else while they were
    being ended, follows from it. A standstill that was no alarm yet explains only the end of all ranks `world` at once,
    and that a rank left which has not moved since: `silent`, when each rank that closed nothing before it left did so.
    """
    causes, everything = list(found), list(found)
    told = {entry.finding.key: entry for entry in journal}
    hangs = [told[f.key] for f in everything if f.key in told and f.traits & Trait.HANG]
    for entry in hangs:
        for finding in everything:
            earlier = finding.key in told and told[finding.key].t_ns < entry.t_ns
            if (
                finding in causes
                and not earlier
                and finding.code != entry.finding.code
                and (_follows(finding, entry.finding, world) or _left_from_it(finding, entry, silent))
            ):
                causes.remove(finding)
    consequences = [f for f in everything if f not in causes]
    if any(Trait.ENDING in f.traits and not (f.early or f.confidence is Confidence.POSSIBLE) for f in causes):
        causes = [f for f in causes if not f.early]  # it stood still for what became a crash
    return causes, consequences


def _working(view: RunView) -> list[int]:
    """The ranks that somebody who ends the job ends: those that have closed their sessions were through before."""
    return [rank for rank in view.ranks if int(view.page(rank)["state"]) != RankState.CLOSED] or view.ranks


def _left_silently(view: RunView) -> dict[int, int]:
    """By rank that left with exit code 0 and closed no session: the monotonic time at which it last moved.

    A program that is through ends its interpreter, which closes the session; another thread, `os._exit` in a handler of
    signals for one, ends a process whose main thread stands still.
    """
    return {r: int(view.page(r)["heartbeat_ns"]) for r, end in endings(view).items() if end.kind is End.EXITED}


def _left_from_it(finding: Finding, hang: Entry, silent: Mapping[int, int]) -> bool:
    """Whether the ranks that are said to have left did nothing after they had been seen to stand still."""
    ranks = set(finding.ranks) & set(hang.finding.ranks)
    return (
        finding.code == "rank-exited-early"
        and ranks >= set(finding.ranks)
        and all(silent.get(rank, hang.t_ns) < hang.t_ns for rank in ranks)
    )


def _follows(finding: Finding, hang: Finding, world: Collection[int]) -> bool:
    if Trait.AFTERMATH in finding.traits:
        suspended = hang.code == "rank-stopped" and set(finding.ranks) <= set(hang.ranks)
        return suspended or set(finding.ranks) >= set(world) or not (hang.early or hang.code == "network-stalled")
    if finding.code == "uncaught-exception":  # a rank that gave up waiting, though its error does not say so plainly
        return finding.confidence is Confidence.POSSIBLE
    recoverable = Trait.RECOVERABLE in hang.traits and hang.code != "network-stalled"
    # What a handler of the interruption calls meets what others wait in: it differs, or seems to get no answer.
    called = Trait.DISAGREEMENT in finding.traits or finding.code == "network-stalled"
    return called and recoverable and not hang.early


def as_it_ended(view: RunView, finding: Finding) -> Finding:
    """A finding of a process that is gone by now, in the past: nobody can resume it."""
    gone = [p for r in finding.ranks if r in view.ranks and (p := view.process(r)) is not None and not p.alive]
    if finding.code != "rank-stopped" or not gone:
        return finding
    said = finding.summary.replace(" is suspended", " was suspended", 1).replace(" are suspended", " were suspended", 1)
    if said == finding.summary:
        return finding
    end = f"killed by {gone[0].ending.removeprefix('killed by ')}" if "killed by" in gone[0].ending else gone[0].ending
    summary = said.rstrip(".") + f"; then {_it(finding)} {end}"
    return replace(finding, summary=summary, next_step="Find out who suspended it; its process is gone since.")


def _stood_until_the_end(view: RunView, ordered: list[Finding]) -> list[str]:
    """How long a hang lasted that nobody survived: its sentence has the time at which it was noticed."""
    last = _last_end_ns(view)
    if not ordered or not ordered[0].traits & Trait.HANG or not last:
        return []
    seconds = (last - ordered[0].since_ns) / 1e9 if ordered[0].since_ns else 0.0
    return [f"it stood still for {duration_text(seconds)}, until its ranks ended"] if seconds > _NOTICED_SECONDS else []


def _last_end_ns(view: RunView) -> int:
    """When the last rank was seen to end; 0 while any may live."""
    ended = [p.ended_ns or p.alive_ns for rank in view.ranks if (p := view.process(rank)) is not None and not p.alive]
    return max(ended, default=0) if len(ended) == len(view.ranks) else 0


def _unwatched(view: RunView) -> list[str]:
    """Ranks that came and recorded nothing, with nothing there to be watched."""
    recorded = set(view.ranks)
    ranks = sorted(r for r, each in read_arrivals(view.root).items() if each.state == "started" and r not in recorded)
    does = "it does" if len(ranks) == 1 else "they do"
    what = f"made no process group and no optimizer of torch, so nothing is recorded of what {does}"
    return [f"{ranks_do(ranks, 'have')} {what}"] if ranks else []


def _it(finding: Finding) -> str:
    """ "it was" or "they were"."""
    return "it was" if len(finding.ranks) == 1 else "they were"


def _says_where(finding: Finding) -> bool:
    """Whether it has a line of the user's own: an interpreter that shuts down shows none any more."""
    stacks = (record.get("frames", ()) for record in finding.evidence if record["what"] == "stack")
    return any(not in_library(str(frame)) for frames in stacks for frame in frames)


def _outgrown(earlier: Finding, now: Iterable[Finding]) -> bool:
    """Whether the same matter is seen now with more ranks, or with the group that it is about."""
    return any(
        (f.code, f.aspect) == (earlier.code, earlier.aspect)
        and earlier.group in (f.group, None)
        and set(f.ranks) >= set(earlier.ranks)
        for f in now
    )


def _merely_gone(earlier: Finding) -> bool:
    """Whether it says that a process was gone before its end was known; of a whole node nothing more may be known."""
    return earlier.code == "rank-dead" and not any(record["what"] == "node" for record in earlier.evidence)


def _first_sign(earlier: Finding, now: Iterable[Finding]) -> bool:
    """Whether it was a rank that stood still while the kernel ran out of memory, before it killed that rank."""
    killed = {rank for f in now if f.code == "rank-oom-killed" for rank in f.ranks}
    return Trait.RECOVERABLE in earlier.traits and bool(earlier.ranks) and set(earlier.ranks) <= killed


def _before_the_capture(earlier: Finding, now: Iterable[Finding]) -> bool:
    """Whether it only says that ranks do not join, and by now it is known why."""
    why = {rank for f in now if Trait.SAYS_WHY in f.traits for rank in f.ranks}
    return earlier.code == "rank-not-joined" and bool(earlier.ranks) and set(earlier.ranks) <= why


def _only_possible(earlier: Finding) -> bool:
    """Whether it was a guess about an end that is better understood now; that nothing moved is none."""
    guess = CATALOGUE[earlier.code].family == "hangs" and earlier.code != "no-progress"
    return guess and earlier.confidence is Confidence.POSSIBLE


def rank_causes(found: Iterable[Finding]) -> list[Finding]:
    """The findings, the root cause first: what stopped the run, surest and earliest, then the rest by severity."""
    ordered = sorted(found, key=_order)
    if ordered and ordered[0].code == "uncaught-exception" and _ABOUT_NUMBERS.search(ordered[0].summary):
        # A program that raises because its numbers are not finite reports a cause that a detector saw before.
        for finding in ordered[1:]:
            if Trait.RAISES in finding.traits:
                ordered.remove(finding)
                return [finding, *ordered]
    for finding in [f for f in ordered if f.code == "replica-divergence"]:
        place = ordered.index(finding)
        first = [f for f in ordered[place:] if _parted(f, finding)]
        ordered = [*ordered[:place], *first, *(f for f in ordered[place:] if f not in first)]
    return ordered


def _parted(finding: Finding, divergence: Finding) -> bool:
    """Whether copies of a model that differ do so because of `finding`; a law that looks at a part may see it later."""
    parting = _OF_MODES if divergence.aspect == COUNTED else _OF_UPDATES
    of_updates = finding.code != "config-mismatch" or finding.aspect.startswith(parting)
    began = (finding.code, finding.aspect) in _OF_BEGINNINGS
    return (
        (Trait.PARTS in finding.traits or began)
        and of_updates
        and finding.confidence is not Confidence.POSSIBLE
        and bool(set(finding.ranks) & set(divergence.ranks))
        and (finding.step or 0) <= (divergence.step or 0) + _SEEN_LATER_STEPS
    )


def _order(finding: Finding) -> tuple[int, int, float, bool, float, str, tuple[int, ...]]:
    stops = CATALOGUE[finding.code].family == "hangs" and Trait.GOES_ON not in finding.traits
    kind = 0 if stops else {Severity.CRITICAL: 1, Severity.WARNING: 2, Severity.NOTE: 3}[finding.severity]
    return (
        kind,
        int(finding.confidence is Confidence.POSSIBLE),
        finding.since_ns or math.inf if kind == 0 else _step(finding),
        Trait.ENDING not in finding.traits,
        _step(finding),
        finding.code,
        finding.ranks,
    )


def _step(finding: Finding) -> float:
    return math.inf if finding.step is None else finding.step


def _ended_from_outside(view: RunView) -> str:
    """A job that somebody ended is in order, but its reader may not know that somebody did."""
    ended = endings(view)
    if not all_told(ended) or any(not e.over for e in ended.values()):
        return ""
    step = max(int(view.page(rank)["steps_done"]) for rank in view.ranks)
    total = total_steps(view.info)
    of = f" of {total:,}" if total else ""
    ways = sorted({e.way for e in ended.values() if e.told})
    left = [rank for rank, ending in ended.items() if ending.told]
    others = {ending.kind for ending in ended.values() if not ending.told}
    seconds = (_last_end_ns(view) - last_movement_ns(view)) / 1e9
    if others and others <= set(LEFT) and seconds > _NOTICED_SECONDS:
        was = " and ".join(ways) if ways[0].startswith("was ") else f"was {' and '.join(ways)}"
        return (
            f"{ranks_text(left)} {was if len(left) == 1 else was.replace('was ', 'were ')}"
            f" {duration_text(seconds)} after the others had finished: rank {left[0]} was {_at_last(view, left[0])}"
        )
    return f"interrupted after step {step:,}{of}: the ranks were {' and '.join(ways).replace('was ', '')}"


def _left_by_themselves(view: RunView) -> list[str]:
    """A job that all ranks left, with an exit code by which the launcher calls it a failure."""
    ended = endings(view)
    ways: dict[str, list[int]] = {}
    for rank, ending in ended.items():
        ways.setdefault(ending.left_by, []).append(rank)
    told = all_told(ended) or any(not e.over for e in ended.values())
    return [] if told else [f"{ranks_text(ranks)} {way}" for way, ranks in list(ways.items())[:_MAX_PAST] if way]


def _failed(view: RunView) -> list[str]:
    """That the command which started the ranks has failed, where nothing says why."""
    code = command_failed(view.info)
    said = f"the command ended with exit code {code}, and nothing that was recorded says why: its output may"
    return [said] if code else []


def _past(entry: Entry) -> str:
    """One matter that is over: what, when, how long up to when the monitor last saw it."""
    finding, seen = entry.finding, entry.event == "cleared"
    lost = entry.lost_seconds if Trait.RECOVERABLE in finding.traits else 0.0
    stood = f", stood still for {duration_text(lost)} or more" if lost else ""
    when = f"over since {entry.utc[11:19]} UTC" if seen else f"over, found at {entry.utc[11:19]} UTC"
    return f"{when}{stood}: {finding.code}: {finding.summary}"


def _lingering(view: RunView, quiet: Stall) -> str:
    """What ranks do whose job waits for nothing but their end: all others have finished. "" where that is not so."""
    ended = endings(view)
    left = [rank for rank, ending in ended.items() if not ending.over]
    if not left or len(left) == len(ended) or any(e.left_by or e.kind not in LEFT for e in ended.values() if e.over):
        return ""
    return (
        f"{ranks_do(left, 'have')} not ended since the others finished, and nothing has moved for"
        f" {duration_text(quiet.seconds)}: rank {left[0]} is {_at_last(view, left[0])}"
    )


def _at_last(view: RunView, rank: int) -> str:
    """Where a rank is that has not ended though the others are through."""
    one = view.rank(rank)
    if one.stack is None or not (one.stack.mentions("_shutdown") and one.stack.mentions("threading.py")):
        return where(interpret(view), rank)
    others = [t.user_frame for t in one.stacks if t is not one.stack and t.user_frame is not None]
    at = next((f" at {frame}" for frame in others if not frame.in_library), "")
    return f"waiting for another of its threads to end{at}; a thread that is no daemon keeps its process alive"


def _pause(view: RunView, quiet: Stall) -> str:
    """How long nothing has moved, when that counts, and who waits for whom meanwhile."""
    situation = interpret(view)
    waits = [
        f"; {waiters(situation, absence)}, for rank {absence.rank}, which is {where(situation, absence.rank)}"
        for absence in situation.absences[:1]
    ]
    limit, first = duration_text(quiet.threshold_seconds), quiet.ranks[0]
    counts = f", which is more than {limit}" if quiet.exceeded else f"; it counts as a hang after {limit}"
    alone = f"; rank {first} is {where(situation, first)}{waits_there(situation, first)}"
    said = "".join(waits) or ("" if situation.blocked else alone)
    return f"nothing has moved for {duration_text(quiet.seconds)}{counts} ({quiet.why}){said}"
