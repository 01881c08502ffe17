"""Ends of ranks that no line explains: what is still known of them, and what to look at."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtobs.catalogue import CRASHED
from dtobs.findings import Confidence, Finding
from dtobs.logs.crashes import CRASHED_SOMEWHERE, EVIDENCE, OUT_OF_RANGE, Scene, cut, records
from dtobs.logs.endings import LoggedEnding
from dtobs.logs.evidence import Sign
from dtobs.logs.templates import Role
from dtobs.words import ranks_text

_LAUNCHER = re.compile(r"elastic|ChildFailedError|SignalException|CalledProcessError|exitcode")
_NODE_DIED = re.compile(r"NODE_DIED|NodeDiedError|node has died|it is running on is dead")
_OF_LAUNCHERS = ("cascade", "exception")
_NCCL_AND_DEVICE = (
    "Look at what NCCL tells before this line (NCCL_DEBUG=INFO) and at the driver's log of the host; run"
    " `dtobs preflight`."
)
_SYSTEM_CALL = (
    "NCCL_DEBUG=WARN tells which call failed. In a container give it shared and locked memory (--ipc=host or"
    " --shm-size, --ulimit memlock=-1); see that NCCL_SOCKET_IFNAME names an interface of this host."
)
_ARGUMENTS = (
    "Correct the command line that starts it; DeepSpeed and torch.distributed.launch add --local_rank (or --local-rank)"
    " by themselves, torchrun does not."
)


def unexplained(scene: Scene, live: Sequence[Sign]) -> list[Finding]:
    """Ranks that ended with an error code where no line says why; nothing where a rank complains of another one."""
    if signalled := [s for s in live if s.kind == "signalled"]:
        return [_signalled(signalled, scene)]
    if workers := [s for s in live if s.kind == "worker-died"]:
        ranks = tuple(sorted({int(s.fields["worker"]) for s in workers if "worker" in s.fields}))
        who = f"worker {ranks[0]}" if ranks else "a worker"
        text = f"the process of {who} is gone, as vLLM tells, and no line here says why"
        step = "Look above this line for the worker's own last words, and in the host's kernel log for a kill."
        return [Finding("rank-dead", text, ranks, Confidence.POSSIBLE, evidence=records(workers), next_step=step)]
    ended = [e for e in scene.endings if e.signal is None and e.code > 0]
    blames = [s for s in live if s.role in (Role.CASCADE, Role.STUCK) and not _LAUNCHER.search(s.text)]
    if not blames and not ended and (aborted := [s for s in live if s.kind == "aborted"]):
        return [_signalled(aborted, scene)]
    lost = ""
    if blames:  # who ended by itself without a line of such an error is what the others lost
        upset = {s.rank for s in blames if s.kind != "ray-died"}
        stuck = any(s.role is Role.STUCK for s in blames)
        least = 2 if None in upset else 1  # whoever complains without a name may be the one that ended by code 1
        ended = [e for e in ended if e.rank is not None and e.rank not in upset and e.code >= least and not stuck]
        if named := sorted(r for r in upset if r is not None):
            lost = f", while {ranks_text(named)} lost the connection to a peer"
    if bare := _bare_exception(scene, ended, bool(blames)) or _of_device(scene):
        return [bare]
    if not ended and (died := [s for s in live if s.kind == "ray-died"]):
        told = next((s.fields for s in died if "host" in s.fields), None)
        which = f" (process {told['pid']} on {told['host']})" if told else ""
        text = f"ray tells that the process of a rank is gone{which}, and no line here says why"
        if any(_NODE_DIED.search(s.text) for s in died):
            text = f"ray tells that the node of a rank is gone{which}"
        step = (
            "Look at ray's log of this worker (session_latest/logs/worker-*), and in its host's kernel log for a kill."
        )
        return [Finding("rank-dead", text, (), Confidence.POSSIBLE, evidence=records(died), next_step=step)]
    system = [s for s in blames if s.kind == "nccl-system" and "InternalError" not in s.text]
    if not ended and system and all(s in system or s.kind in _OF_LAUNCHERS for s in blames):
        return [_system_call(scene, system)]
    if not ended:
        return []
    ranks = tuple(sorted({e.rank for e in ended if e.rank is not None}))
    return [
        Finding(
            "rank-dead",
            f"{ranks_text(ranks) if ranks else 'a rank'} ended by {ended[0].words()}{lost}, and no line here says why",
            ranks,
            Confidence.POSSIBLE,
            evidence=tuple({"what": e.text or e.words(), "rank": e.rank, "where": e.where} for e in ended[:EVIDENCE]),
            next_step="Give the output of these ranks as well (torchrun --log-dir DIR --redirects 3), or let main be "
            "wrapped in torch.distributed.elastic.multiprocessing.errors.record, which writes the exception down.",
        )
    ]


def _system_call(scene: Scene, signs: Sequence[Sign]) -> Finding:
    """NCCL could not do something on a rank's own host, and nobody is seen to have left before."""
    first = next((s for s in signs if "site" in s.fields), signs[0])
    ranks = tuple(sorted({s.rank for s in signs if s.rank is not None}))
    reason = scene.nccl_reason(first)
    site = f" at {first.fields['site']}" if first.fields.get("site") else ""
    text = (
        f"a system call of NCCL failed on {ranks_text(ranks) if ranks else 'a rank'}{reason}{site}: {cut(first.text)}"
    )
    sure = Confidence.LIKELY if reason else Confidence.POSSIBLE
    return Finding("uncaught-exception", text, ranks, sure, evidence=records(signs), next_step=_SYSTEM_CALL)


def _bare_exception(scene: Scene, ended: Sequence[LoggedEnding], blames: bool) -> Finding | None:
    """The last exception of which a paste has only the line that names it, where its rank or the end of one is told."""
    known = [s for s in scene.bare if s.rank is not None]
    if not (known or (scene.bare and ended and not blames)):
        return None
    last = (known or scene.bare)[-1]
    ranks = tuple(sorted({s.rank for s in known if s.rank is not None and s.fields == last.fields}))
    ranks = ranks or tuple(sorted({e.rank for e in ended if e.rank is not None}))
    who, program = ranks_text(ranks) if ranks else "a rank", last.fields["type"]
    text, step = (
        f"{who} told of {cut(last.text)}",
        "Look at the traceback of this line, which is not among those given.",
    )
    if program.endswith(".py"):  # argparse's own words
        text, step = f"{who} refused the arguments of {program}: {cut(last.fields['message'])}", _ARGUMENTS
    sure = Confidence.LIKELY if known else Confidence.POSSIBLE
    return Finding("uncaught-exception", text, ranks, sure, evidence=records([last]), next_step=step)


def _of_device(scene: Scene) -> Finding | None:
    """What a kernel asserts, or NCCL tells of a call of CUDA, where no exception says more."""
    assertion = scene.said.get("device-assert", "")
    if signs := [s for s in scene.device if s.kind == "device-assert"]:
        text, step = f"a kernel of a rank failed: {assertion}", OUT_OF_RANGE
    elif signs := [s for s in scene.device if s.kind == "nccl-cuda"]:
        text, step = f"NCCL could not use the device: {signs[0].fields['what']}", _NCCL_AND_DEVICE
    else:
        return None
    ranks = tuple(sorted({s.rank for s in signs if s.rank is not None}))
    return Finding("uncaught-exception", text, ranks, Confidence.LIKELY, evidence=records(signs), next_step=step)


def _signalled(signs: Sequence[Sign], scene: Scene) -> Finding:
    """A shell or Python itself tells which signal ended a process."""
    ranks = tuple(sorted({s.rank for s in signs if s.rank is not None}))
    first = signs[0]
    what = next(first.fields[name] for name in ("signal", "caught", "handled", "told", "alone") if name in first.fields)
    who = ranks_text(ranks) if ranks else "a process of the job"
    killed = ": its host or container may have run out of memory" if what == "Killed" else ""
    site = scene.fatal_site(ranks)
    text = f"{who} ended by a signal ({what}){site}{killed}: {cut(first.text)}"
    step = CRASHED if site else "" if what == "Killed" else CRASHED_SOMEWHERE
    return Finding("rank-dead", text, ranks, Confidence.POSSIBLE, evidence=records(signs), next_step=step)
