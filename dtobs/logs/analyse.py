"""From logs to findings: reads every file once, then asks the rules in the order of causes."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from dtobs.findings import Confidence, Finding
from dtobs.logs import meetings, quality
from dtobs.logs.crashes import Scene, crashes, is_root
from dtobs.logs.endings import LoggedEnding, endings
from dtobs.logs.evidence import LogEvidence, Sign, Track, Writer, sign_of
from dtobs.logs.frontier import GroupFrontier, frontiers, rank_of
from dtobs.logs.hangs import Heard, hangs
from dtobs.logs.pace import paces, spikes
from dtobs.logs.places import places
from dtobs.logs.ranks import RankMap, resolve, world_size
from dtobs.logs.reader import LogFile
from dtobs.logs.templates import ANCHORS, TEMPLATES, Role
from dtobs.logs.unexplained import unexplained
from dtobs.words import count, ranks_text

_STEPS_AFTER = 3
_BY_ITSELF = re.compile(r"DUE TO|death signal|SIGINT|SIGHUP|[Pp]reempted|KeyboardInterrupt")
"""What an interruption says that has a reason of its own."""
_ENDS = ("exit-code", "segfault", "srun-task", "spawn-exit", "child-signal", "mpi-first")
_LOST_LESS = ("nccl-system", "exit-barrier")
_LOST = ("nccl-remote", "horovod-down", "gloo-closed", "engine-died", "rendezvous-closed", "store-lost", *_LOST_LESS)
"""Of these lines the first is told; those that tell of no peer only where there is no other."""
_WAITED = ("work-timeout", "watchdog-stuck", "hccl-timeout", "hccl-start")
_ENGINE_WAITS = 4
_QUOTED, _QUOTED_BEFORE = 160, 60
_LAST_LINES = 20
_MAX_RANKS_SHOWN = 4096
_CANCELLED, _GLOO = "CANCELLED AT", "/gloo/"
_CRASHED = ("uncaught-exception", "device-out-of-memory", "device-fault", "illegal-address", "disk-full")
INTERRUPTED, ENDED_WELL, NO_FURTHER = (
    "the job was interrupted from outside",
    "the job ended well",
    "no attempt came further",
)
"""Words of notes by which restart advice goes."""


@dataclass(frozen=True)
class LogRank:
    """One rank as its lines leave it."""

    rank: int
    waits_in: str = ""
    site: str = ""
    step: int | None = None
    ending: str = ""
    host: str = ""


@dataclass(frozen=True)
class LogAnalysis:
    """What logs say."""

    world_size: int
    findings: tuple[Finding, ...]
    ranks: tuple[LogRank, ...]
    missing_ranks: tuple[int, ...]
    notes: tuple[str, ...]
    bytes_read: int = 0
    groups: tuple[GroupFrontier, ...] = field(default=())
    step: int | None = None  #: the latest that any line tells
    understood: bool = True  #: at least one line tells something of a training job


def analyse_logs(files: Sequence[LogFile]) -> LogAnalysis:
    """Read the logs and judge them."""
    evidence = LogEvidence()
    for index, (file, place) in enumerate(zip(files, places([file.name for file in files]), strict=True)):
        evidence.begin(index, file.name, place, partial(getattr, file, "head"))
        for number, raw in file.lines(ANCHORS, lambda: evidence.hot):
            evidence.add_line(number, raw)
    evidence.end()
    notes = [file.problem for file in files if file.problem]
    return judge(evidence, len(files) > 1, notes, sum(file.bytes_read for file in files))


def judge(evidence: LogEvidence, several_files: bool, notes: list[str], bytes_read: int = 0) -> LogAnalysis:
    """The analysis of evidence that is collected."""
    signs, ranks = resolve(evidence, several_files)
    tracks = _tracks(evidence, ranks)
    over = _over(signs, evidence, endings(evidence, signs, ranks))
    ended = endings(evidence, signs, ranks, over)
    live = [sign for sign in signs if sign.role is Role.INFO or sign.order > over[sign.file]]
    world, told = world_size(live, evidence, ranks)
    groups = frontiers(live)
    finished = frozenset(s.rank for s in signs if s.kind == "completed" and s.rank is not None)
    heard = replace(_heard(evidence, ranks, live, world, tracks), told=told, finished=finished)
    findings = _causes(live, ended, groups, heard, evidence)
    findings += quality.findings(tracks, live)
    if not findings:
        findings += spikes(tracks)
    notes = [*notes, *_notes(live, ended, findings, tracks), *_attempts(signs, evidence), *paces(tracks)]
    if not findings and not (ended or any(INTERRUPTED in note or ENDED_WELL in note for note in notes)):
        notes += [
            f"a line tells of an error, and none says that a rank ended: {_quoted(s)}"
            for s in live
            if s.kind == "bare-exception" and not _went_on(s, evidence, ended)
        ][-1:]
    known = heard.ranks | {ending.rank for ending in ended}
    missing = tuple(rank for rank in range(min(world, _MAX_RANKS_SHOWN)) if rank not in known) if heard.ranks else ()
    return LogAnalysis(
        world,
        tuple(findings),
        tuple(_ranks(heard, groups, ended, findings, _hosts(evidence, ended))),
        missing,
        tuple(notes),
        bytes_read,
        tuple(groups),
        step=max((track.step for track in tracks.values() if track.step is not None), default=None),
        understood=bool(signs or tracks or world or heard.ranks or _of_nccl(evidence)),
    )


def _of_nccl(evidence: LogEvidence) -> bool:
    return any(writer.kind == "nccl" for _, writer in evidence.writers)


def _causes(
    live: list[Sign], ended: list[LoggedEnding], groups: list[GroupFrontier], heard: Heard, evidence: LogEvidence
) -> list[Finding]:
    stuck = frozenset(r for s in live if s.kind in _WAITED and (r := rank_of(s)) is not None)
    alone = [s for s in live if s.role is Role.ADVICE and not _went_on(s, evidence, ended)]
    scene = Scene(
        roots=[*(s for s in live if is_root(s)), *_told_in_table(evidence, live)],
        endings=ended,
        stuck_ranks=stuck,
        complaining=frozenset(s.rank for s in live if s.rank is not None and s.role in (Role.CASCADE, Role.STUCK)),
        timed_out=any(s.kind in ("work-timeout", "hccl-timeout", "hccl-start") for s in live),
        cancelled_at={s.file: s.order for s in reversed(live) if s.kind == "interrupted" and _CANCELLED in s.text},
        bare=[s for s in alone if s.kind == "bare-exception"],
        device=[s for s in alone if s.kind != "bare-exception"],
        said=_said(live),
        nccl_warned=[s for s in live if s.kind in ("nccl-warn", "nccl-cuda", "nccl-bootstrap")],
        without_gradient={int(s.fields["rank"]): s.fields["names"] for s in live if s.kind == "without-gradient"},
        fatal_sites={s.rank: s.fields["site"] for s in live if s.kind == "fatal-site"},
    )
    found = crashes(scene)
    if not found and not _interrupted(live, ended, scene.timed_out):
        found = (
            meetings.named(live, heard)
            or meetings.across_backends(live, hangs(groups, heard))
            or meetings.others(live, heard, ended)
        )
        if not found or (found[0].code == "dumps-missing" and any(s.kind == "signalled" for s in live)):
            found = unexplained(scene, live) or found
    return found or meetings.at_barrier(live, heard, evidence.moved)


def _said(live: list[Sign]) -> dict[str, str]:
    """What an allocator says of a heap, and a kernel of its arguments; the first of each."""
    heap = next((s.fields["what"] for s in live if s.kind == "heap"), "")
    failed = next((s.fields for s in live if s.kind == "device-assert"), {})
    twice = next((s.fields for s in live if s.kind == "twice-ready"), {})
    assertion = f"{failed['kernel']} asserts `{failed['what']}`" if failed else ""
    return {"heap": heap, "device-assert": assertion, "twice-ready": twice.get("name") or twice.get("which", "")}


def _went_on(sign: Sign, evidence: LogEvidence, ended: list[LoggedEnding]) -> bool:
    """Whether training made steps after a line, or much else was told and the end of no rank."""
    moved = any(at > sign.order for at, _ in evidence.moved.get(sign.file, ()))
    return moved or (not ended and evidence.ends[sign.file] - sign.order > _LAST_LINES)


def _told_in_table(evidence: LogEvidence, live: list[Sign]) -> list[Sign]:
    """Exceptions that only torchrun's table tells."""
    known = {(s.rank, s.fields.get("type")) for s in live if "type" in s.fields}
    texts = {s.text for s in live}
    found = []
    for entry in evidence.failures:
        raised = entry.raised
        if raised is None or (entry.rank, raised.type) in known or raised.text in texts:
            continue
        writer = Writer("rank", -1 if entry.rank is None else entry.rank)
        sign = sign_of(raised, writer, entry.where, entry.order, entry.file)
        if is_root(sign):
            found.append(replace(sign, rank=entry.rank))
    return found


def _interrupted(live: list[Sign], ended: list[LoggedEnding], timed_out: bool) -> bool:
    return not timed_out and any(s.kind == "interrupted" and not _follows(s, live, ended) for s in live)


def _follows(sign: Sign, live: list[Sign], ended: list[LoggedEnding]) -> bool:
    """Whether an interruption comes after the job's own failure: who launched it then ends what is left of it."""
    if _BY_ITSELF.search(sign.text):
        return False
    before = [s for s in live if s.order < sign.order]
    failures = [e for e in ended if e.signal != signal.SIGTERM]
    troubled = any(
        s.file == sign.file and (s.role in (Role.ROOT, Role.CASCADE) or s.kind in ("closing", *_ENDS)) for s in before
    )
    return (
        any(s.role is Role.STUCK for s in before)
        or any(e.order < sign.order for e in failures)
        or (troubled and bool(failures))
    )


def _over(signs: list[Sign], evidence: LogEvidence, ended: list[LoggedEnding]) -> dict[int, int]:
    """By file, the line up to which the job got over what there was: it trained on, began again or ended well."""
    finished: dict[int, int] = {}
    restarted: dict[int, int] = {}
    trouble: dict[int, int] = {}
    stuck = {(sign.file, rank_of(sign)) for sign in signs if sign.kind == "work-timeout"}
    for sign in signs:
        if sign.kind == "completed":
            if sign.rank is not None and any(file == sign.file and rank != sign.rank for file, rank in stuck):
                continue  # one rank is through, and others wait for it
            finished[sign.file] = sign.order
        elif sign.kind == "restart":
            restarted[sign.file] = sign.order
        elif sign.role in (Role.ROOT, Role.STUCK, Role.CASCADE) or sign.kind in _ENDS:
            trouble[sign.file] = sign.order
    for ending in ended:
        trouble[-1] = max(ending.order, trouble.get(-1, -1))
    last = _last_attempts(evidence)
    return {
        file: _got_over(file, finished, restarted, trouble, evidence) if last[file] else sys.maxsize
        for file in evidence.attempt_of
    }


def _last_attempts(evidence: LogEvidence) -> dict[int, bool]:
    """By file, whether it is of its node's last attempt, as torchrun's folders ``attempt_N`` say."""
    newest: dict[str, int] = {}
    for node, attempt in evidence.attempt_of.values():
        newest[node] = max(attempt, newest.get(node, 0))
    return {file: attempt == newest[node] for file, (node, attempt) in evidence.attempt_of.items()}


def _got_over(
    file: int, finished: dict[int, int], restarted: dict[int, int], trouble: dict[int, int], evidence: LogEvidence
) -> int:
    """The last line of a file before which nothing counts any more, or -1."""
    moved = list(evidence.moved.get(file, ()))
    last_trouble = max(trouble.get(file, -1), trouble.get(-1, -1))
    candidates = [-1]
    if file in finished and last_trouble < finished[file]:
        candidates.append(finished[file])
    if file in restarted and any(at > restarted[file] for at, _ in moved):
        candidates.append(restarted[file])
    # Progress after trouble: it was handled, unless the job then ended badly (what it printed may have been held back).
    later = [(at, step) for at, step in moved if at > trouble.get(file, -1)]
    if len({step for _, step in later}) >= _STEPS_AFTER and trouble.get(-1, -1) < later[-1][0]:
        candidates.append(later[0][0])
    return max(candidates)


def _tracks(evidence: LogEvidence, ranks: RankMap) -> dict[int | None, Track]:
    """Progress by rank; what nobody is known to have written is under None, the longest of it."""
    found: dict[int | None, Track] = {}
    for writer, track in evidence.tracks.items():
        rank = ranks.rank(writer, track.file)
        if rank not in found or len(found[rank].seen) < len(track.seen):
            found[rank] = track
    return found


def _heard(
    evidence: LogEvidence, ranks: RankMap, live: list[Sign], world: int, tracks: dict[int | None, Track]
) -> Heard:
    known = {rank for file, writer in evidence.writers if (rank := ranks.rank(writer, file)) is not None}
    known |= {int(sign.fields["rank"]) for sign in live if sign.kind == "member"}
    known |= {rank for sign in live if (rank := rank_of(sign)) is not None}
    known |= {int(sign.fields["rank"]) for sign in live if sign.kind == "store-barrier-waits"}
    steps = {rank: track.step for rank, track in tracks.items() if rank is not None and track.step is not None}
    by_file: dict[int, set[int]] = {}
    for sign in live:
        if (rank := rank_of(sign)) is not None:
            by_file.setdefault(sign.file, set()).add(rank)
    shared = len(by_file) == 1 and len(next(iter(by_file.values()))) > 1
    return Heard(world, frozenset(rank for rank in known if rank < world), steps, shared)


def _hosts(evidence: LogEvidence, ended: list[LoggedEnding]) -> dict[int, str]:
    """By rank, the host that NCCL's lines or its launcher name."""
    found = {max(votes)[1]: host for (host, _), votes in evidence.pids.items()}
    return found | {ending.rank: ending.host for ending in ended if ending.rank is not None and ending.host}


def _ranks(
    heard: Heard,
    groups: list[GroupFrontier],
    ended: list[LoggedEnding],
    findings: list[Finding],
    hosts: dict[int, str],
) -> list[LogRank]:
    waits: dict[int, tuple[str, str]] = {}
    for group in groups:
        for standing in group.standings.values():
            if standing.stuck is not None and standing.rank not in waits:
                label = f" of {group.label}" if group.label else ""
                waits[standing.rank] = (f"{standing.call()} #{standing.stuck}{label}", standing.site)
    ends = {rank: f.code for f in findings[:1] if f.code in _CRASHED for rank in f.ranks}
    ends |= {e.rank: e.words() for e in ended if e.rank is not None}
    shown = sorted({*heard.ranks, *waits, *ends})[:_MAX_RANKS_SHOWN]
    return [
        LogRank(rank, *waits.get(rank, ("", "")), heard.steps.get(rank), ends.get(rank, ""), hosts.get(rank, ""))
        for rank in shown
    ]


def _notes(
    live: list[Sign], ended: list[LoggedEnding], findings: list[Finding], tracks: dict[int | None, Track]
) -> list[str]:
    notes = []
    outside = [s for s in live if s.kind == "interrupted" and not _follows(s, live, ended)]
    came_first = any(
        e.signal is not None and e.file == s.file and e.order < s.order for e in ended for s in outside[:1]
    )
    if outside and not came_first and not any(f.confidence is Confidence.CERTAIN for f in findings):
        notes.append(f"{INTERRUPTED}: {_quoted(outside[0])}")
    ended_so = [e for e in ended if e.signal == signal.SIGTERM]
    if ended_so and not outside and not findings:
        who = ranks_text(sorted({e.rank for e in ended_so if e.rank is not None})) or "a rank"
        notes.append(f"{INTERRUPTED}: {who} ended by {ended_so[0].words()} ({ended_so[0].where})")
    well = [s for s in live if s.kind == "completed"]
    done = {s.file: s.order for s in well}  # connections close after that
    lost = [s for s in live if s.kind in _LOST and (s.kind != "gloo-closed" or "type" in s.fields or _GLOO in s.text)]
    lost = [s for s in lost if s.order < done.get(s.file, sys.maxsize)]
    if lost and not findings:
        notes.append(_lost(lost))
    if not findings and (waits := [s for s in live if s.kind == "engine-waits"]) and len(waits) >= _ENGINE_WAITS:
        notes.append(
            f"vLLM's engine waited for its workers many times ({waits[-1].where}): their stacks say where they stand"
        )
    if not findings and not tracks:
        notes += _not_registered(live)
    moved = max((track.seen[-1][0] for track in tracks.values() if track.seen), default=-1)
    if well and not findings and not outside and well[-1].order > moved:
        notes.append(f"{ENDED_WELL}, as a line says: {' '.join(well[-1].text.split())[:160]} ({well[-1].where})")
    steps = [track.step for track in tracks.values() if track.step is not None]
    if steps:
        latest = max((t for t in tracks.values() if t.step is not None), key=lambda t: (t.step or 0, t.told_at))
        at = f" at {latest.told_at}" if latest.told_at else ""
        notes.append(f"the last progress line tells step {latest.step}{at}")
    if findings and not findings[0].ranks and ended:
        named = sorted({e.rank for e in ended if e.rank is not None})
        if named:
            notes.append(f"the launcher lists {ranks_text(named)} as failed, the first of them by the clock only")
    return notes


def _lost(signs: list[Sign]) -> str:
    """A note on ranks that lost somebody, and on whom they lost."""
    first = min(signs, key=lambda s: s.kind in _LOST_LESS)
    ranks = sorted({s.rank for s in signs if s.kind == first.kind and s.rank is not None})
    who = ranks_text(ranks) if ranks else "a rank"
    if first.kind == "store-lost":
        what = "lost the store, which rank 0 or its launcher holds as a rule: their logs may say why"
    elif first.kind == "nccl-system" and "InternalError" in first.text:
        what = "met an internal error of NCCL and nothing here says which, NCCL_DEBUG=INFO would"
    elif first.kind == "nccl-system":
        what = "met an error of a system call of NCCL and nothing here says which, NCCL_DEBUG=WARN would"
    elif first.kind == "engine-died":
        who, what = "vLLM's engine", "could not start or lost a worker, whose own lines would say why"
    elif first.kind == "exit-barrier":
        who, what = "a launcher", "waited in vain for those of other nodes to end: their logs may say why"
    elif first.kind == "rendezvous-closed":
        who, what = "a launcher", "found the rendezvous closed, by another node's or after too many failures"
    else:
        what = "lost a peer and nothing here says why, the log of the other side may"
    return f"{who} {what}: {_quoted(first)}"


def _quoted(sign: Sign) -> str:
    """What a line says around the words that make it a sign, and where it stands."""
    text = " ".join(sign.text.split())
    found = [at for row in TEMPLATES if row.kind == sign.kind for word in row.literals if (at := text.find(word)) >= 0]
    begin = max(0, min(found, default=0) - _QUOTED_BEFORE) if len(text) > _QUOTED else 0
    begin = max(text.rfind(" ", 0, begin) + 1, begin - _QUOTED_BEFORE // 2)
    return f"{'…' if begin else ''}{text[begin : begin + _QUOTED]} ({sign.where})"


def _not_registered(live: list[Sign]) -> list[str]:
    """A note on ranks that have not said that they initialise, as Lightning's others have, and then no line came."""
    members = {int(s.fields["rank"]): int(s.fields["members"]) for s in live if s.kind == "member"}
    missing = sorted(set(range(min(max(members.values(), default=0), _MAX_RANKS_SHOWN))) - set(members))
    if len(members) < 2 or not missing or any("started" in s.fields for s in live):
        return []
    others = ranks_text(sorted(members))
    return [f"{ranks_text(missing)} did not say to initialise, as {others} did: where the job stands still, look there"]


def _attempts(signs: list[Sign], evidence: LogEvidence) -> list[str]:
    """How often the launcher began anew, and whether that helped."""
    restarts = [sign for sign in signs if sign.kind == "restart"]
    if not restarts:
        older = max((attempt for _, attempt in evidence.attempt_of.values()), default=0)
        return [f"the last of {older + 1} attempts is judged, as the folders' names count them"] if older else []
    steps = [str(step) for step in evidence.attempts if step is not None]
    told = f"the launcher restarted the job {count(len(restarts), 'time')}"
    if len(steps) < 2:
        return [f"{told}; the last attempt is judged"]
    ends = [step for step in evidence.attempts if step is not None]
    stuck = f": {NO_FURTHER}" if max(ends[1:]) <= ends[0] else ""
    shown = steps[-8:]
    return [f"{told}; the attempts ended at steps {', '.join(shown[:-1])} and {shown[-1]}{stuck}"]
