"""Which line ended the job: an exception, a signal, memory, a device, a disk. What follows from it is not accused.

A sign counts while nothing shows that its writer went on: progress after it, or a job that ended well, mean that it
was handled. An exception that only tells of another rank's death, or that comes after its own rank's time-out, is a
consequence.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtobs.catalogue import after_signal
from dtobs.findings import CATALOGUE, Confidence, Finding
from dtobs.logs import fingerprints
from dtobs.logs.endings import DEADLY, LoggedEnding
from dtobs.logs.evidence import Sign
from dtobs.logs.frontier import rank_of
from dtobs.logs.templates import Role
from dtobs.logs.traces import is_installed
from dtobs.words import numbers, ranks_text, verb

_XID_OF_PROGRAMS = {"13", "31", "43", "45", "68", "69", "109"}
_RECEIVED = ("gloo-sizes", "nccl-truncated")
"""Lines of a rank to which a peer sent another size: either of them may be the odd one, and often it is the peer."""
_SUPPOSED = ("nccl-mismatch", "fingerprint-alone")
"""Lines that name a rank and say that they suppose it: "at and around this rank"."""
_NAMING = ("nccl-twice", "loss-nan", "gradient-nan")
"""Lines that name the rank they are about, whoever prints them."""
_TOLD_LATE = ("device-lost",)
"""What a driver says of a device that it has reset: a kernel that never ends brings it to that as well."""
_USUALLY = ("nccl-segment", "checkpoint-write")
"""What nearly always means that there is no room, and does not say so."""
_ABORTS = ("illegal-address", "device-fault")
"""What a driver ends a process for by SIGABRT, without a word of who it is."""
_WITHOUT_MULTICAST = (
    "Set NCCL_NVLS_ENABLE=0 to go on without it, more slowly; have the Fabric Manager and the NVSwitches of the host"
    " looked at."
)
_UNITS = {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}
_HOLDS = re.compile(r"Process (\d{1,10}) has (\d{1,6}\.\d\d) ([KMG]iB) memory in use")
"""Where the driver does not know, the amount has eleven digits."""
_RESERVED = re.compile(r"(\d{1,6}\.\d\d) ([KMG]iB) is (?:allocated by PyTorch|reserved by PyTorch but unallocated)")
_KERNEL = "kernel: "
_REPEATED = "Caught "
"""How torch begins to repeat what a loader's worker or a replica raised, with the original traceback after it."""
EVIDENCE, _SHORTLY = 8, 60
_SHOWN = 220


@dataclass(frozen=True)
class Scene:
    """What crash rules look at: live root signs, endings, and who only complains of others."""

    roots: list[Sign]
    endings: list[LoggedEnding]
    stuck_ranks: frozenset[int]
    complaining: frozenset[int]  #: ranks with a cascade line
    timed_out: bool
    cancelled_at: dict[int, int] = field(default_factory=dict)  #: by file, the line that cancels the job
    bare: Sequence[Sign] = ()  #: exceptions without a traceback, of which nothing shows that they were got over
    device: Sequence[Sign] = ()  #: what kernels assert and NCCL tells of a device, got over by nobody
    fatal_sites: dict[int | None, str] = field(default_factory=dict)  #: where Python stood when a signal ended it
    said: Mapping[str, str] = field(default_factory=dict)  #: beside a crash, by kind: "heap", "device-assert"
    without_gradient: Mapping[int, str] = field(default_factory=dict)  #: by rank, the parameters that DDP lists
    nccl_warned: Sequence[Sign] = ()  #: what NCCL warns of

    def cancelled(self, ending: LoggedEnding) -> bool:
        """Whether the scheduler had taken the job back before it tells that this rank was killed."""
        return ending.signal == signal.SIGKILL and ending.order > self.cancelled_at.get(ending.file, ending.order)

    def nccl_reason(self, sign: Sign) -> str:
        """What NCCL warned of last, shortly before it refused a call."""
        before = (s for s in self.nccl_warned if s.file == sign.file and 0 < sign.order - s.order <= _SHORTLY)
        last = max(before, key=lambda s: s.order, default=None)
        return f" ({cut(last.fields['what'])})" if last is not None and "what" in last.fields else ""

    def fatal_site(self, ranks: Sequence[int]) -> str:
        """Where the only rank of a crash stood, as its own lines tell or, for want of others, nobody's."""
        if len(ranks) > 1:
            return ""
        own = self.fatal_sites.get(ranks[0] if ranks else None) or self.fatal_sites.get(None)
        return f" at {own}" if own else ""


_OPEN_FILES = (
    "The process may open no more files: raise the limit (ulimit -n), or let loaders share memory otherwise with"
    " torch.multiprocessing.set_sharing_strategy('file_system')."
)
_READY_TWICE = (
    "It got its gradient twice in one backward: it is used outside forward, or in two re-entrant backward passes."
    " Checkpoint activations with use_reentrant=False, or let DDP know that the graph stays (static_graph=True)."
)
CRASHED_SOMEWHERE = (
    "Native code crashed in it, nobody killed it: read its last lines, and run it with PYTHONFAULTHANDLER=1, which"
    " prints the line of Python where it crashes."
)


OUT_OF_RANGE = (
    "A kernel was given a value that it does not allow, such as a label or an index out of range: run the step with"
    " CUDA_LAUNCH_BLOCKING=1 to see which call, or with its batch on the CPU."
)
_ADVICE = {
    "device-side assert": OUT_OF_RANGE,
    "mark a variable ready only once": _READY_TWICE,
    "Too many open files": _OPEN_FILES,
    "received 0 items of ancdata": _OPEN_FILES,
}
"""What to do about an exception, by words of its message."""
_OTHER_MODELS = (
    "Print the number of parameters on each rank before DDP wraps the model. A count of 0, or one that no model has, is"
    " of a rank that was in another call at that moment."
)
_HEAP = (
    "A native extension wrote beyond its memory or freed it twice: run the rank with PYTHONFAULTHANDLER=1 and"
    " MALLOC_CHECK_=3, and suspect what was built for another version of torch or libc."
)


def crashes(scene: Scene) -> list[Finding]:
    """The cause of a crash, at most one."""
    by_code: dict[str, list[Sign]] = defaultdict(list)
    kinds = {sign.kind for sign in scene.roots}
    for sign in scene.roots:
        code = _code(sign)
        if sign.kind == "nccl-misuse" and "nccl-truncated" in kinds:
            continue  # the same error: here its kind, there its reason
        if sign.kind == "host-oom" and "exited unexpectedly" in sign.text and _other_signal(scene.roots):
            continue  # of a loader's worker; another line says which signal ended it
        if code:
            by_code[code].append(sign)
    for code in sorted({*by_code, "rank-dead"}, key=lambda code: CATALOGUE[code].order):
        if code == "rank-dead" and (found := _killed(scene, by_code[code])) is not None:
            return [found]
        if by_code[code] and (made := _finding(code, by_code[code], scene)) is not None:
            return [made]
    return []


def _other_signal(roots: Sequence[Sign]) -> bool:
    """Whether a worker of a loader was ended by another signal than the one of a host without memory."""
    return any("is killed by signal: " in s.text and "signal: Killed" not in s.text for s in roots)


def _code(sign: Sign) -> str:
    if sign.kind == "xid" and sign.fields.get("xid") in _XID_OF_PROGRAMS:
        return "illegal-address" if sign.fields["xid"] in ("13", "31") else ""
    if sign.kind == "fingerprint":
        return fingerprints.code_of(sign)
    return sign.code


def _finding(code: str, signs: list[Sign], scene: Scene) -> Finding | None:
    if code == "uncaught-exception":
        return _exception(signs, scene)
    if code == "rank-oom-killed":
        return _host_memory(signs, scene)
    first = min(signs, key=lambda s: s.order)
    ranks = _ranks(signs, scene, code)
    supposed = all(s.kind in (*_SUPPOSED, *_TOLD_LATE, *_USUALLY) for s in signs)
    supposed |= first.kind == "fingerprint" and fingerprints.is_unfilled(first.fields.get("theirs", ""))
    counts = first.kind == "ddp-shapes" and "mine" in first.fields  # of parameters, by which nobody's shape is known
    confidence = Confidence.CERTAIN if ranks and not supposed and not counts else Confidence.LIKELY
    step = _WITHOUT_MULTICAST if first.kind == "nvls" else _OTHER_MODELS if counts else ""
    text = _summary(code, first, signs, ranks)
    if code == "unused-parameters":
        names = "; ".join(scene.without_gradient.get(rank, "") for rank in ranks[:1])
        text += f": {cut(names)}" if names else ""
    return Finding(code, text, ranks, confidence, evidence=records(signs), next_step=step)


def _ranks(signs: Sequence[Sign], scene: Scene, code: str) -> tuple[int, ...]:
    if code in ("collective-mismatch", "shape-mismatch", "dtype-mismatch", "call-site-mismatch"):
        return _odd_of_fingerprints(signs)
    if code == "nccl-misuse" and (pairs := [s for s in signs if "other" in s.fields and "device" in s.fields]):
        return tuple(sorted({int(s.fields[name]) for s in pairs for name in ("rank", "other")}))
    if told := {int(s.fields["rank"]) for s in signs if s.kind in _NAMING}:
        return tuple(sorted(told))
    if code == "unused-parameters" and scene.without_gradient:
        return tuple(sorted(scene.without_gradient))
    ranks = {rank for sign in signs if (rank := rank_of(sign)) is not None}
    if ranks:
        return tuple(sorted(ranks))
    failed = {e.rank for e in scene.endings if e.rank is not None and e.code == 1}
    if not failed and code in _ABORTS:
        failed = {e.rank for e in scene.endings if e.rank is not None and e.signal == 6}
    return tuple(sorted(failed)) if len(failed) == 1 or 1 < len(failed) <= len(signs) else ()


def _odd_of_fingerprints(signs: Sequence[Sign]) -> tuple[int, ...]:
    """Each such line compares two ranks; the odd ones are those of the rarer call, all of them where none is rarer."""
    calls: dict[int, str] = {}
    told = {int(s.fields["rank"]) for s in signs if s.kind in _SUPPOSED and "rank" in s.fields}
    if told:  # each names the rank it is about
        return tuple(sorted(told))
    if all(s.kind in _RECEIVED for s in signs):
        return ()
    for sign in signs:
        fields = sign.fields
        if sign.kind == "fingerprint" and "other" in fields:
            calls[int(fields["rank"])] = fingerprints.operation(fields["mine"]) + fingerprints.shape(fields["mine"])
            calls.setdefault(
                int(fields["other"]), fingerprints.operation(fields["theirs"]) + fingerprints.shape(fields["theirs"])
            )
        elif "other" in fields and "theirs" in fields:
            calls |= {int(fields["rank"]): fields["mine"], int(fields["other"]): fields["theirs"]}
        elif sign.rank is not None:
            calls[sign.rank] = sign.text
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, call in calls.items():
        groups[call].append(rank)
    largest = max((len(ranks) for ranks in groups.values()), default=0)
    rest = sorted(rank for ranks in groups.values() if len(ranks) < largest for rank in ranks)
    return tuple(rest or sorted(calls))


def _summary(code: str, first: Sign, signs: Sequence[Sign], ranks: tuple[int, ...]) -> str:
    host = _host(first)
    who = ranks_text(ranks) if ranks else f"a rank on {host}" if host else "a rank"
    told = cut(first.fields.get("message") or first.text)
    site = f" at {first.fields['site']}" if first.fields.get("site") else ""
    if code == "device-out-of-memory":
        wanted = f" while it asked for {first.fields['wanted']}" if "wanted" in first.fields else ""
        other = _other_process(first.text)
        return f"{who} ran out of device memory{wanted}{site}{other}"
    if code == "device-fault":
        xid = f" (Xid {first.fields['xid']} at {first.fields['bus']})" if "xid" in first.fields else ""
        if first.kind == "sxid":
            return f"an NVLink switch of the host failed (SXid {first.fields['xid']} at {first.fields['bus']}): {told}"
        if first.kind == "nvls":
            return f"the NVLink switches of {who} refused a multicast, or their Fabric Manager did: {told}"
        return f"the device of {who} failed{xid}: {told}"
    if code == "illegal-address":
        return f"a kernel of {who} accessed memory that is not its own{site}: {told}"
    if first.kind == "checkpoint-write":
        return f"{who} could not write a checkpoint{site}, as on a disk that is full or a quota used up: {told}"
    if code == "disk-full":
        path = first.fields.get("path") or ""
        return f"{who} found no space left{f' in {path}' if path else ''}{site}: {told}"
    if code == "nccl-misuse":
        return f"NCCL refused the call of {who}: {cut(_most_telling(signs))}"
    if first.kind == "fingerprint" and "other" in first.fields:
        one, other = (f"rank {first.fields[name]} calls {fingerprints.call_text(first.fields[call])}"
                      for name, call in (("rank", "mine"), ("other", "theirs")))  # fmt: skip
        return f"{one} where {other}{site}"
    if first.kind == "ddp-shapes" and "mine" in first.fields:
        rank, mine, other, theirs = (first.fields[name] for name in ("rank", "mine", "other", "theirs"))
        return f"DDP got {theirs} as the number of parameters of rank {other}, and {mine} of rank {rank}"
    if first.kind in _RECEIVED and "got" in first.fields:
        got, wanted = first.fields["got"], first.fields["wanted"]
        receiver = "a rank" if first.rank is None else ranks_text([first.rank])
        return f"{receiver} got {got} bytes from a peer where its own call has {wanted}: their calls differ{site}"
    if first.kind == "nccl-mismatch":
        return f"NCCL supposes that calls differ around {who}: {told}"
    if code in ("loss-nonfinite", "gradient-nonfinite"):
        what = "loss" if code == "loss-nonfinite" else "gradient"
        return f"{who} computed a {what} that is not finite{site}: {told}"
    if code == "unused-parameters":
        return f"a backward on {who} left out parameters that DDP waits for{site}"
    return f"{who}: {told}{site}"


def _most_telling(signs: Sequence[Sign]) -> str:
    return next((s.text for s in signs if s.kind in ("nccl-duplicate", "nccl-version")), signs[0].text)


def _other_process(text: str) -> str:
    """The memory that the largest process other than the rank's own holds on its device, where the message says so.

    PyTorch calls its own process "this process", but in a container, where the driver knows it by another number, it
    is one of those that the message lists: the one whose memory is nearest to what PyTorch reserved, or the largest.
    """
    held = [(float(amount) * _UNITS[unit], f"process {pid} holds {amount} {unit} of it")
            for pid, amount, unit in _HOLDS.findall(text)]  # fmt: skip
    if "this process has" not in text and held:
        reserved = sum(float(amount) * _UNITS[unit] for amount, unit in _RESERVED.findall(text))
        held.remove(min(held, key=lambda one: abs(one[0] - reserved)) if reserved else max(held))
    return f"; {max(held)[1]}" if held else ""


def _exception(signs: list[Sign], scene: Scene) -> Finding | None:
    """Of several exceptions, one that the fewest ranks raised outside of a collective call."""
    groups: dict[tuple[str, str], list[Sign]] = defaultdict(list)
    for sign in signs:
        after_stall = sign.rank in scene.stuck_ranks or (scene.timed_out and sign.rank is None)
        if not after_stall:
            groups[sign.fields.get("type", ""), sign.fields.get("site", "")].append(sign)
    if not groups:
        return None
    chosen = min(
        groups.values(),
        key=lambda g: (
            g[0].fields.get("comm", ""),
            len({s.rank for s in g}),
            g[0].fields.get("message", "").startswith(_REPEATED),
            "site" not in g[0].fields,
            g[0].order,
        ),
    )
    ranks = _ranks(chosen, scene, "uncaught-exception")
    first = chosen[0]
    message = f": {cut(first.fields['message']).rstrip('.')}" if first.fields.get("message") else ""
    assertion = scene.said.get("device-assert", "") if "device-side assert" in message else ""
    message += f" ({assertion})" if assertion else ""
    message += scene.nccl_reason(first) if first.kind == "cuda-failure" else ""
    twice = scene.said.get("twice-ready", "") if first.kind == "ready-twice" else ""
    message += f" ({twice})" if twice else ""
    site = _own_site(first, signs)
    told = {e.rank for e in scene.endings if e.rank is not None}
    sure = bool(ranks) and (set(ranks) <= told or not told) and (len(ranks) == 1 or chosen[0].rank is not None)
    return Finding(
        "uncaught-exception",
        f"{ranks_text(ranks) if ranks else 'a rank'} raised {first.fields.get('type', 'an exception')}{message}{site}",
        ranks,
        Confidence.CERTAIN if sure else Confidence.LIKELY,
        evidence=records(chosen),
        next_step=next((step for words, step in _ADVICE.items() if words in message), ""),
    )


def _own_site(first: Sign, signs: Iterable[Sign]) -> str:
    """Where it was raised, by the user's own line: of a chain, the exception that was raised from it may have that."""
    site = first.fields.get("site", "")
    if is_installed(site):
        later = (s.fields.get("site", "") for s in signs if s.writer == first.writer and s.order > first.order)
        site = next((other for other in later if other and not is_installed(other)), site)
    return f" at {site}" if site else ""


def _host_memory(signs: list[Sign], scene: Scene) -> Finding | None:
    killed = [e for e in scene.endings if e.signal == 9]
    named = {s.rank for s in signs if s.rank is not None and s.kind == "host-oom"}
    tasks = {e.rank for e in killed if e.rank is not None}
    tasks |= {task for s in signs if "tasks" in s.fields for task in numbers(s.fields["tasks"])}
    pids = {int(s.fields["pid"]) for s in signs if "pid" in s.fields}
    ranks = tuple(
        sorted(
            {e.rank for e in killed if e.pid in pids and e.rank is not None}
            or tasks
            or {r for r in named if r is not None}
        )
    )
    host = next((s.fields["host"] for s in signs if "host" in s.fields), next((e.host for e in killed if e.host), ""))
    who = ranks_text(ranks) if ranks else f"a process{f' on {host}' if host else ''}"
    killed_by = f"{verb(len(ranks) or 1, 'were')} killed: {'their' if len(ranks) > 1 else 'its'} host or container"
    return Finding(
        "rank-oom-killed",
        f"{who} {killed_by} ran out of memory: {cut(signs[0].text)}",
        ranks,
        Confidence.CERTAIN if ranks and pids else Confidence.LIKELY,
        evidence=records(signs),
    )


def _killed(scene: Scene, failed_nodes: list[Sign]) -> Finding | None:
    """Ranks that a signal ended and that had nothing to complain of before."""
    if failed_nodes:
        host = failed_nodes[0].fields.get("host", "a host")
        if failed_nodes[0].kind == "not-started":
            step, what = (failed_nodes[0].fields[name] for name in ("step", "what"))
            text = f"SLURM could not start step {step} on {host}: {cut(what)}"
            advice = f"Look at slurmd's log on {host} and at its clock, then start the job again without it."
            return Finding("rank-dead", text, (), Confidence.CERTAIN, evidence=records(failed_nodes), next_step=advice)
        return Finding(
            "rank-dead", f"{host} failed under the job: {cut(failed_nodes[0].text)}", (), Confidence.CERTAIN,
            evidence=records(failed_nodes),
        )  # fmt: skip
    dead = [e for e in scene.endings if e.signal in DEADLY and e.signal != 6 and not scene.cancelled(e)]
    aborted = [e for e in scene.endings if e.signal == 6]
    quiet = [e for e in dead if e.rank is None or e.rank not in scene.stuck_ranks]
    if not quiet and not scene.timed_out:
        quiet = [e for e in aborted if e.rank is None or e.rank not in scene.complaining]
    ranks = tuple(sorted({e.rank for e in quiet if e.rank is not None}))
    if not quiet:
        return None
    first = quiet[0]
    hosts = sorted({e.host for e in quiet if e.host})
    on = f" on {' and '.join(hosts)}" if 0 < len(hosts) <= 2 else f" on {len(hosts)} hosts" if hosts else ""
    site = "" if first.signal == signal.SIGKILL else scene.fatal_site(ranks)
    heap = scene.said.get("heap", "") if first.signal == signal.SIGABRT else ""
    heap = f" and found its heap corrupted ({heap})" if heap else ""
    everyone = len(ranks) > 1 and len(ranks) == len({e.rank for e in scene.endings})
    return Finding(
        "rank-dead",
        f"{ranks_text(ranks) if ranks else 'a rank'} ended by {first.words()}{on}{heap}{site}",
        ranks,
        Confidence.LIKELY if not everyone else Confidence.POSSIBLE,
        evidence=tuple({"what": e.text or e.words(), "rank": e.rank, "where": e.where} for e in quiet[:EVIDENCE]),
        next_step=_HEAP if heap else _after(first.signal or 0, site),
    )


def _after(number: int, site: str) -> str:
    """What to do about a rank that this signal ended, at `site` where that is told."""
    if number == signal.SIGKILL:
        return ""
    return after_signal(number, CRASHED_SOMEWHERE, shown=bool(site))


def records(signs: Iterable[Sign]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"what": s.text, "rank": s.rank, "where": s.where} | ({"failed_host": host} if (host := _host(s)) else {})
        for s in list(signs)[:EVIDENCE]
    )


def _host(sign: Sign) -> str:
    """The host that a failure names, or whose kernel tells of one; pods and nodes of a launcher are no hosts."""
    if sign.kind == "node-failed":
        return sign.fields.get("host", "")
    return (
        sign.writer.node
        if sign.writer.kind == "file" and sign.kind in ("xid", "sxid", "ecc") and _KERNEL in sign.text
        else ""
    )


def cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def is_root(sign: Sign) -> bool:
    """Whether a sign can be a cause by itself."""
    if sign.kind == "cuda-failure" and "type" not in sign.fields:
        return False  # only the exception says whose it is
    return sign.role is Role.ROOT and sign.fields.get("wanted") != "more than 1EB"
