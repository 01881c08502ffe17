"""Ranks that wait without a watchdog's frontier: Gloo, the store, NCCL's start, reports that name the absent."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from dtobs.calls.agree import judge
from dtobs.calls.words import mismatch_text
from dtobs.findings import Confidence, Finding
from dtobs.logs.endings import LoggedEnding
from dtobs.logs.evidence import Sign
from dtobs.logs.frontier import rank_of
from dtobs.logs.hangs import Heard
from dtobs.words import count, ranks_do, ranks_text, verb

_NUMBER = re.compile(r"\d{1,7}")
_STALLED = re.compile(r"\[(missing|ready) ranks: ([\d, ]{1,4000})\]")
_LINES_OF_HALF_A_MINUTE = 3
_OF_BEFORE = "the store still counts an earlier attempt or another job"
_IB_STATUS = {
    "4": "its memory is not registered: suspect GPUDirect, drivers or limits of locked memory, not the link",
    "5": "flushed, which follows from an earlier error",
    "10": "the peer refused access to its memory",
    "12": "nothing came back from the peer: its link, its port or its process",
    "13": "the peer was not ready to receive for too long",
}
"""Of libibverbs' `ibv_wc_status`, what NCCL prints most."""
_MADE_AT_HOME = frozenset(
    {"ibv_create_qp", "ibv_create_cq", "ibv_reg_mr", "ibv_reg_mr_iova2", "ibv_alloc_pd", "ibv_open_device"}
)
"""Calls of libibverbs that ask nothing of another host."""
_OWN_HOST = (
    "This call asks nothing of another host: see how much memory the process may lock (ulimit -l; in a container"
    " --ulimit memlock=-1) and that the devices under /dev/infiniband are given to it."
)
_PORT_DOWN = "Look at this port, its cable and its switch: a link that comes and goes stalls whoever sends over it."
_WATCHDOG_STEP = (
    "Take the stacks of these ranks (py-spy dump --native): a call of CUDA that does not come back, or a thread that"
    " keeps Python's lock, stops the watchdog; the network does more rarely."
)
_STORE = ("store-waits", "store-barrier", "store-connect", "store-bind", "rendezvous", "gloo-mesh")


def named(live: Sequence[Sign], heard: Heard) -> list[Finding]:
    """Reports of torch itself that name the ranks which did not come (monitoredBarrier, TORCH_NCCL_DESYNC_DEBUG)."""
    reports = [s for s in live if s.kind in ("barrier-missing", "desync") and s.fields.get("ranks")]
    if not reports:
        return _started_apart(live)
    ranks = tuple(sorted({int(n) for s in reports for n in _NUMBER.findall(s.fields["ranks"])}))
    call = reports[0].fields.get("next")
    what = (
        "monitoredBarrier"
        if reports[0].kind == "barrier-missing"
        else f"collective #{call}"
        if call
        else "a collective"
    )
    if not ranks or len(ranks) >= heard.world > 1:
        return []
    return [
        _finding(
            "rank-not-joined",
            f"{ranks_text(ranks)} never came to {what}, as torch reports",
            ranks,
            Confidence.CERTAIN,
            reports,
        )
    ]


def _started_apart(live: Sequence[Sign]) -> list[Finding]:
    """Ranks that stand in one call with other operations, as the snapshot of torch's desync report lists them."""
    began: dict[int, dict[int, str]] = defaultdict(dict)
    signs = [s for s in live if s.kind in ("desync-at", "desync-started")]
    seq = 0
    for at, started in pairwise(signs):
        if at.kind == "desync-at":
            seq = int(at.fields["seq"])
        if started.kind == "desync-started" and at.file == started.file:
            began[seq] |= dict.fromkeys(map(int, _NUMBER.findall(started.fields["ranks"])), started.fields["op"])
    for seq, ops in sorted(began.items()):
        if (found := judge(ops, len(ops))) is not None:
            text = mismatch_text("collective-mismatch", f"#{seq}, as torch reports", found, ops.__getitem__)
            return [_finding("collective-mismatch", text, found.odd, found.confidence, signs)]
    return []


def across_backends(live: Sequence[Sign], found: list[Finding]) -> list[Finding]:
    """Some ranks in NCCL, all others in Gloo: neither half will come to the other's call."""
    gloo = {s.rank for s in live if s.kind in ("gloo-timeout", "gloo-closed") and s.rank is not None}
    if found and found[0].code in ("dumps-missing", "network-stalled"):
        return _unnamed_in_gloo(live, found) or _with_links(live, found)
    sure = any(s.kind == "gloo-timeout" for s in live)
    if not found or found[0].code != "rank-not-joined" or not set(found[0].ranks) <= gloo:
        return found
    if not sure and len(found[0].ranks) < 2:
        return found
    waiting = {int(record["rank"]) for record in found[0].evidence if record.get("waits_in") is not None}
    text = f"{ranks_do(found[0].ranks, 'are')} in Gloo and {ranks_text(waiting)} in NCCL, for each other"
    signs = [s for s in live if s.kind in ("gloo-timeout", "gloo-closed")]
    confidence = Confidence.LIKELY if sure else Confidence.POSSIBLE
    return [_finding("group-deadlock", text, tuple(sorted({*found[0].ranks, *waiting})), confidence, signs)]


def _with_links(live: Sequence[Sign], found: list[Finding]) -> list[Finding]:
    """What lines of InfiniBand say of a call that nobody completes."""
    if ports := sorted({s.fields["hca"] for s in live if s.kind == "port-down"}):
        text = f"{found[0].summary}; the kernel tells that the port of {', '.join(ports[:4])} went down"
        return [replace(found[0], summary=text, next_step=f"{found[0].next_step} {_PORT_DOWN}".strip())]
    links = _links(live)
    if not links or found[0].code != "network-stalled":
        return found
    evidence = (*links[0].evidence[:4], *found[0].evidence)
    return [replace(found[0], summary=f"{found[0].summary}; {links[0].summary}", evidence=evidence)]


def _unnamed_in_gloo(live: Sequence[Sign], found: list[Finding]) -> list[Finding]:
    """Some ranks wait in NCCL, and time-outs in Gloo bear nobody's name: perhaps they wait for each other."""
    signs = [s for s in live if s.kind == "gloo-timeout"]
    waiting = {int(record["rank"]) for record in found[0].evidence if record.get("waits_in") is not None}
    if not signs or not waiting or any(s.rank is not None for s in signs):
        return []
    text = f"{ranks_do(waiting, 'wait')} in NCCL while others timed out in Gloo: perhaps for each other"
    return [_finding("group-deadlock", text, tuple(sorted(waiting)), Confidence.POSSIBLE, signs)]


def others(live: Sequence[Sign], heard: Heard, ended: Sequence[LoggedEnding]) -> list[Finding]:
    """The first of Gloo, HCCL, the store, NCCL's start and links that has something to say."""
    return (
        _horovod(live, heard)
        or _timed_out("Gloo", "gloo-timeout", live, heard)
        or _timed_out("DeepEP", "deepep-timeout", live, heard)
        or _hccl_start(live)
        or _timed_out("HCCL", "hccl-timeout", live, heard)
        or _store(live, heard)
        or _nccl_start(live, heard)
        or _links(live)
        or _watchdogs(live)
    )


def _horovod(live: Sequence[Sign], heard: Heard) -> list[Finding]:
    """Tensors that some ranks submitted to Horovod and others did not, as its coordinator lists them."""
    signs = [s for s in live if s.kind == "horovod-stalled"]
    lists = [found for s in signs for found in _STALLED.findall(s.text)]
    told = [(which, frozenset(map(int, _NUMBER.findall(ranks)))) for which, ranks in lists]
    everyone = frozenset(range(heard.world))
    missing = {ranks if which == "missing" else everyone - ranks for which, ranks in told if ranks} - {frozenset()}
    if not told:
        return []
    came = {ranks for which, ranks in told if which == "ready"}
    apart = len(came) > 1 and not frozenset.intersection(*came)
    if apart or (len(missing) > 1 and not frozenset.intersection(*missing)):
        text = "ranks submitted different tensors to Horovod, each of which waits for the others"
        return [_finding("collective-mismatch", text, (), Confidence.LIKELY, signs)]
    absent = tuple(sorted(frozenset.union(*missing))) if missing else ()
    who = ranks_text(absent) if absent else f"others than {ranks_text(sorted(frozenset.union(*came)))}"
    text = f"{who} did not submit tensors to Horovod for which the rest waits"
    return [_finding("rank-not-joined", text, absent, Confidence.LIKELY, signs)]


def _hccl_start(live: Sequence[Sign]) -> list[Finding]:
    signs = [s for s in live if s.kind == "hccl-start"]
    if not signs:
        return []
    text = f"HCCL's communicator never came about: {signs[0].fields['what']}"
    step = (
        "See that no process of an earlier training holds the devices (npu-smi info), and check HCCL_SOCKET_IFNAME and"
        " the firewall between the hosts."
    )
    return [_finding("nccl-init-stuck", text, (), Confidence.POSSIBLE, signs, step)]


def _timed_out(library: str, kind: str, live: Sequence[Sign], heard: Heard) -> list[Finding]:
    """Ranks that timed out in a library which counts no calls: those that did not are absent."""
    timed_out = [s for s in live if s.kind == kind]
    if not timed_out:
        return []
    waiting = {s.rank for s in timed_out if s.rank is not None}
    closed = {s.rank for s in live if s.kind == "gloo-closed" and s.rank is not None} - waiting
    silent = heard.ranks - waiting - closed
    absent = tuple(sorted(silent or (closed if len(closed) == 1 else set())))
    if absent and waiting and 2 * len(absent) <= heard.world:
        sure = Confidence.LIKELY if silent else Confidence.POSSIBLE
        site = next((s.fields["site"] for s in timed_out if s.fields.get("site")), "")
        text = f"{ranks_text(absent)} never came to the {library} call in which {ranks_text(waiting)} timed out"
        return [_finding("rank-not-joined", text + (f" at {site}" if site else ""), absent, sure, timed_out)]
    unheard = tuple(rank for rank in range(heard.world) if rank not in heard.ranks)
    if unheard and waiting:
        text = f"{ranks_text(waiting)} timed out in {library}; the logs of {ranks_text(unheard)} would say for whom"
        return [_finding("dumps-missing", text, unheard, Confidence.POSSIBLE, timed_out)]
    text = f"ranks timed out in {library}, and no line says for whom they waited"
    return [_finding("network-stalled", text, (), Confidence.POSSIBLE, timed_out)]


def _store(live: Sequence[Sign], heard: Heard) -> list[Finding]:
    signs = [s for s in live if s.kind in _STORE]
    if not signs:
        return []
    counted = next((s for s in signs if "joined" in s.fields), None)
    step = ""
    missing = tuple(rank for rank in range(heard.world) if rank not in heard.ranks)
    if counted is not None:
        joined, size = int(counted.fields["joined"]), int(counted.fields["size"])
        if joined > size:
            text = f"{joined} ranks are counted at a barrier of {size}, so it never ends: {_OF_BEFORE}"
            return [_finding("rendezvous-incomplete", text, (), Confidence.LIKELY, signs)]
        ranks = missing if len(missing) == size - joined else ()
        who = f": {ranks_text(ranks)} {verb(len(ranks), 'are')} not heard of" if ranks else ""
        text = f"only {joined} of {size} ranks came to the rendezvous{who}"
    elif bound := next((s for s in signs if s.kind == "store-bind"), None):
        bound = next((s for s in live if s.kind in ("store-bind", "store-port") and "port" in s.fields), bound)
        port = f"port {bound.fields['port']}" if "port" in bound.fields else "its port"
        denied = "errno: 13" in bound.text or "EACCES" in bound.text
        why = "it is not allowed to" if denied else "another process may have it already"
        ranks, text = (), f"the rendezvous could not listen on {port}: {why}"
        step = (
            "Take a --master-port above 1023."
            if denied
            else "See who listens there (ss -ltnp), perhaps a job before; end it, or take another --master-port."
        )
    elif "host" in signs[0].fields:
        at = f"{signs[0].fields['host']}:{signs[0].fields['port']}"
        unknown = "unknown" in signs[0].fields
        why = "cannot be asked: its name is not known on this host" if unknown else "did not answer"
        step = (
            "Check the name given as MASTER_ADDR or --rdzv-endpoint, and that this host knows it (getent hosts NAME)."
            if unknown
            else "Check that its host runs, that MASTER_ADDR and MASTER_PORT are its own, and firewalls between."
        )
        ranks, text = (), f"the rendezvous at {at} {why}"
    else:
        ranks, text = (), f"the rendezvous never came about: {' '.join(signs[0].text.split())[:160]}"
    return [_finding("rendezvous-incomplete", text, ranks, Confidence.LIKELY, signs, step)]


def at_barrier(live: Sequence[Sign], heard: Heard, moved: Mapping[int, Collection[tuple[int, int]]]) -> list[Finding]:
    """Ranks that wait in the store's barrier of a new process group as their last lines say, without a time-out yet.

    `moved`: by file the (order, step) of progress lines. Whoever trains or starts NCCL after the barrier has passed it.
    """
    waits: dict[str, list[Sign]] = defaultdict(list)
    for sign in live:
        if sign.kind == "store-barrier-waits":
            waits[sign.fields["key"]].append(sign)
    for key, signs in waits.items():
        last = {file: max(s.order for s in signs if s.file == file) for file in {s.file for s in signs}}
        later = {file: max(order for order, _ in lines) for file, lines in moved.items() if lines}
        for sign in live:
            if sign.kind in ("nccl-init", "nccl-ready", "completed"):
                later[sign.file] = max(sign.order, later.get(sign.file, 0))
        over = any(s.kind == "store-barrier-over" and s.fields["key"] == key for s in live)
        if not over and not any(order > last.get(file, -1) for file, order in later.items()):
            return _incomplete_barrier(key, signs, heard)
    return []


def _incomplete_barrier(key: str, signs: list[Sign], heard: Heard) -> list[Finding]:
    latest = max(signs, key=lambda s: int(s.fields["joined"]))
    joined, size = int(latest.fields["joined"]), int(latest.fields["size"])
    waiting = {int(s.fields["rank"]) for s in signs}
    lines = max(int(s.fields["times"]) for s in signs)
    confidence = Confidence.LIKELY if lines >= _LINES_OF_HALF_A_MINUTE else Confidence.POSSIBLE
    who = f"{ranks_text(waiting)} {verb(len(waiting), 'are')} seen to wait"
    if joined > size:
        text = f"{joined} ranks are counted at a barrier ({key}) of {size}, so it never ends: {_OF_BEFORE}; {who}"
        return [_finding("rendezvous-incomplete", text, (), confidence, signs)]
    missing = size - joined
    if not missing:
        return []
    of_all = key.endswith(":0") or (key.endswith(":1") and "worker_count=" in latest.text)
    unseen = tuple(sorted(set(range(size)) - waiting)) if of_all and size >= heard.world else ()
    named = unseen if len(unseen) == missing else ()
    others = f", and {ranks_text(named)} {verb(missing, 'are')} not" if named else ""
    if not named and joined > len(waiting):
        others = "; which others came, and which did not, no line says"
    text = (
        f"{count(missing, 'rank')} of {size} never came to the barrier of init_process_group or new_group ({key}):"
        f" {who}{others}"
    )
    return [_finding("rendezvous-incomplete", text, named, confidence, signs)]


def _nccl_start(live: Sequence[Sign], heard: Heard) -> list[Finding]:
    asked = [s for s in live if s.kind == "nccl-id"]
    if asked:
        source = int(asked[0].fields["source"])
        text = (
            f"rank {source} never gave the id of a new NCCL communicator, for which {count(len(asked), 'rank')} asked"
        )
        return [_finding("nccl-init-stuck", text, (source,), Confidence.LIKELY, asked)]
    begun = {
        (s.fields.get("comm", ""), s.fields["rank"]): s for s in live if s.kind == "nccl-init" and "rank" in s.fields
    }
    ready = {
        (s.fields.get("comm", ""), s.fields["rank"]) for s in live if s.kind == "nccl-ready" and "rank" in s.fields
    }
    open_ = [sign for key, sign in begun.items() if key not in ready]
    trouble = [
        s for s in live if s.kind in ("nccl-bootstrap", "ib-completion", "nccl-system", "nccl-remote", "watchdog-stuck")
    ]
    if not open_ and not ready and (refused := [s for s in trouble if s.kind == "nccl-bootstrap"]):
        text = f"NCCL's communicators never came about: {refused[0].fields.get('what', '')}"
        return [_finding("nccl-init-stuck", text, (), Confidence.POSSIBLE, refused)]
    if not open_ or not trouble:
        return []
    size = int(open_[0].fields["size"])
    comm = open_[0].fields.get("comm", "")
    started = {int(rank) for name, rank in begun if name == comm}
    absent = tuple(rank for rank in range(size) if rank not in started) if size <= 65536 else ()
    few = absent if 2 * len(absent) < size else ()
    text = f"NCCL's communicator of {size} ranks never came about: {len(started)} of them began"
    return [
        _finding("nccl-init-stuck", text, few, Confidence.LIKELY if few else Confidence.POSSIBLE, [*trouble, *open_])
    ]


def _links(live: Sequence[Sign]) -> list[Finding]:
    signs = [s for s in live if s.kind in ("ib-completion", "ib-call")]
    if not signs:
        return []
    ranks = tuple(sorted({s.rank for s in signs if s.rank is not None}))
    peers = sorted({s.fields["peer"] for s in signs if "peer" in s.fields})
    hcas = sorted({s.fields["hca"] for s in signs if "hca" in s.fields})
    words = [f"to {', '.join(peers[:4])}" if peers else "", f"through {', '.join(hcas[:4])}" if hcas else ""]
    text = f"InfiniBand connections broke {' '.join(word for word in words if word)}".rstrip()
    if request := next((s.fields["what"] for s in signs if "what" in s.fields), ""):
        text = f"libfabric's connections broke: {request}"
    if status := next((s.fields["status"] for s in signs if s.fields.get("status") not in (None, "5")), ""):
        text += f" with status {status}" + (f" ({_IB_STATUS[status]})" if status in _IB_STATUS else "")
    if call := next((s.fields for s in signs if "call" in s.fields), None):
        text = f"InfiniBand's {call['call']} failed" + (f": {call['event']}" if "event" in call else "")
    step = _OWN_HOST if call is not None and call["call"] in _MADE_AT_HOME else ""
    return [_finding("network-stalled", text, ranks, Confidence.LIKELY, signs, step)]


def _watchdogs(live: Sequence[Sign]) -> list[Finding]:
    signs = [s for s in live if s.kind == "watchdog-stuck"]
    if not signs:
        return _unnumbered(live) or _unanswered(live)
    ranks = {rank for s in signs if (rank := rank_of(s)) is not None}
    who = f" of {ranks_text(ranks)}" if ranks else ""
    text = f"NCCL or CUDA calls hang: the watchdog{who} made no progress, and no line says in which collective"
    return [_finding("network-stalled", text, (), Confidence.POSSIBLE, signs, _WATCHDOG_STEP)]


def _unanswered(live: Sequence[Sign]) -> list[Finding]:
    """vLLM's engine asked its workers for a step and got no answer in time."""
    signs = [s for s in live if s.kind == "engine-rpc"]
    if not signs:
        return []
    call = next((f" of {s.fields['call']}" for s in signs if "call" in s.fields), "")
    text = f"the workers of vLLM did not answer a call{call} of their engine in time, and no line says where they stand"
    return [_finding("network-stalled", text, (), Confidence.POSSIBLE, signs)]


def _unnumbered(live: Sequence[Sign]) -> list[Finding]:
    """Time-outs of torch before 1.13, which count no calls, and of lines that a terminal broke."""
    signs = [s for s in live if s.kind == "work-timeout"]
    if not signs:
        return []
    ranks = {rank for s in signs if (rank := rank_of(s)) is not None}
    calls = sorted({s.fields["op"] for s in signs if "op" in s.fields})
    where = f" in {', '.join(calls[:4])}" if calls else ""
    who = ranks_do(ranks, "wait") if ranks else "ranks wait"
    text = f"{who}{where}, and no line says in which call of the group: those of the other ranks would say for whom"
    return [_finding("dumps-missing", text, (), Confidence.POSSIBLE, signs)]


def _finding(
    code: str, text: str, ranks: tuple[int, ...], confidence: Confidence, signs: Sequence[Sign], step: str = ""
) -> Finding:
    records = tuple({"what": s.text, "rank": s.rank, "where": s.where} for s in signs[:8])
    return Finding(code, text, ranks, confidence, evidence=records, next_step=step)
