"""Who wrote a line: what launchers, schedulers and loggers put before it, taken off layer by layer.

torchrun ``[default3]:`` and ``[node0:default3]:``, torch ``[rank3]:`` (and torchtitan's ``[rank1]:[rank3]:``, the first
of which is local), srun ``3:``, mpirun ``[1,3]<stderr>:``, kubectl
``[pod/…]``, ray ``(Worker pid=1)``, pdsh ``host:``, journald and container runtimes, times, the head of a C++ log line,
ANSI colours. Collectors that write JSON put the line itself under one of a few names: `unwrapped`. What a viewer puts
before every line of a file (stern ``pod container``, CloudWatch ``stream``) is learned from its beginning: `columns`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from dtobs.logs.places import REPLICAS
from dtobs.words import without_escapes

_LAYERS = 8
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), 127], None)

_RANK = re.compile(r"\[(?:rank|RANK|Rank)[ :=]{0,2}(\d{1,7})\[?\]:? ?")
_WATCHDOG_WORDS = (
    "Watchdog",
    "NCCL ",
    "Collective ",
    "Some NCCL",
    "To avoid data",
    "Work ",
    "Process group",
    "First PG",
)
_ROLE_RANK = re.compile(r"\[[A-Za-z_]\w{0,30}-(\d{1,5}):(\d{1,7})\]: ?")
_ROLE = re.compile(r"\[(?:([\w.\-]{1,80}):)?([A-Za-z_]{1,30}?)[_-]?(\d{1,5})\]:(?= |\[|$|\S) ?")
_MPI = re.compile(r"\[\d{1,4},(?:mpirank:)?(\d{1,7})(?:,[\w.\-]{1,60})?\](?:<std(?:out|err)>)?: ?")
_LABEL = re.compile(r" {0,6}(\d{1,6}): ")
_POD = re.compile(r"\[(?:pod/)?([\w.\-]{1,120})(?:/([\w.\-]{1,120}))?\] ")
_STERN = re.compile(r"([a-z0-9][\w.\-]{0,100}-\d{1,6})\s{1,8}(?:[\w.\-]{1,60}\s{1,4})?[|│>] ")
_RAY = re.compile(r"\([A-Za-z_][\w.:<>\-]{0,80} (?:\w{1,20}=\w{1,40}, )?pid=(\d{1,9})(?:, ip=([\w.:]{1,60}))?\) ?")
_LOGGER = re.compile(
    r"[\w.\-]{1,60} - (?:DEBUG|INFO|WARNING|ERROR|CRITICAL) - "
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[\w.\-/]{1,120}:\d{1,6}\] )?"
    r"|\[[\w.\-]{1,80}\]\[(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\] - "
    r"|(?:TRACE|DEBUG|INFO|SUCCESS|WARNING|ERROR|CRITICAL) {1,5}\| [\w.<>\-]{1,80}:[\w.<>]{1,80}:\d{1,6} - "
)
_STREAM = re.compile(r"(?:stderr|stdout|STDERR|STDOUT)(?:: ?| [FP] )")
_HOST = re.compile(
    r"(?!E[A-Z]\d{4}:)((?:[A-Za-z][\w\-]{0,60}\d[\w\-]{0,30}(?:\.[\w\-]{1,30}){0,6})): "
    r"(?=[\[{T(*\dWEI ]|(?:[A-Za-z_]\w{0,60}\.){0,6}[A-Z]\w{1,60}(?:Error|Exception|Interrupt)\b)"
)
_ADDRESS = re.compile(r"(\d{1,3}(?:\.\d{1,3}){3}): |([A-Za-z][\w.\-]{0,60}) >> ")
"""What pdsh puts before a line, and DeepSpeed's runner."""
_PIPE = re.compile(r" {0,4}\| (?=\d{4}-\d\d-\d\d[T ])")
_TIME = re.compile(
    r"\[?\(?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d{1,9})?)?"
    r"(?:Z| ?[+-]\d\d:?\d\d)?\)?\]?(?: - |: |, | \||\t)? ?"
)
_SYSLOG = re.compile(
    r"(?:<\d{1,3}>)?[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d ([\w.\-]{1,80}) (?:[\w.\-/]{1,60}\[\d{1,9}\]: )?"
    r"|([\w.\-]{1,80}) [\w.\-/]{1,60}\[\d{1,9}\]: "
)
_QUOTED = re.compile(r"[> `]{1,8}(?=\[(?:rank|default)\d|\[E\d{3,4} |\d{4}-\d\d-\d\d[T ]\d\d:)")
_CLOCK = re.compile(r"\[?\d\d:\d\d:\d\d(?:[.,]\d{1,6})?\]? (?=\S)")
_NUMBER = re.compile(r"\[\d{3,9}\] (?=\[|Traceback| {1,8}File |[A-Z]\w{1,60}(?:Error|Exception)\b)")
_C10 = re.compile(r"\[[EWIF](?:\d{3,4} [\d:.]{8,20})? ?([A-Za-z_0-9]+\.(?:cpp|hpp|cc|h)):\d+\] ?")
_GLUED = re.compile(
    rb"(?<=[.\w])(?=\[(?:rank|default)\d{1,7}\]:|\[E(?:\d{3,4} [\d:.]{8,20})? ?\w{1,60}\.cpp:\d{1,6}\])"
)
_BEHIND_BAR = re.compile(
    rb"(?<=\])(?=\[(?:rank|default)\d{1,7}\]:|\[E(?:\d{3,4} [\d:.]{8,20})? ?\w{1,60}\.cpp:\d{1,6}\])"
)
"""Where a line follows a bar of progress that was not ended."""
_PY_WORD = re.compile(r"\.(?:py|cpp|cc|sh|hpp)$")


_LINE_UNDER = ("log", "message", "MESSAGE", "msg", "textPayload", "jsonPayload")
"""Under which name Docker, Fluent Bit, journald, structlog and cloud consoles keep the line that a program wrote."""


_ANY_REPLICA = "$replica$"
_REPLICA = re.compile(rf"(?<![a-z])(?:{'|'.join(REPLICAS)})(?![a-z])")
_COLUMN = re.compile(r"([\w.\-/:$\[\]]{1,160})([ \t|]|$)")
_NUMBERED = re.compile(r"(?=.*\d)(?=.*[\-/])[a-z\d.\-/$\[\]]+$")
"""As pods and streams are called, and not as modules of Python or words of a log are."""
_SPEAKER = re.compile(
    r"(?!(?:srun|slurmstepd|kernel|salloc):)[A-Za-z][\w.\-$]{0,100}:$(?<!Error:)(?<!Exception:)|0(?:\.0){3}:$"
)
"""A host or a process, as pdsh names it. SLURM's name, the kernel's or an exception's is a part of what a line says."""
_CONTAINER = re.compile(r"[a-z][a-z\d\-]*$")
_LEAST_LINES, _MOST_LINES = 8, 64
_SAME = 4
"""Of so many lines one may have another pod, or another stream, on average."""
_TELLING = frozenset(
    [
        "step",
        "epoch",
        "iter",
        "iteration",
        "batch",
        "loss",
        "train",
        "training",
        "info",
        "debug",
        "error",
        "warning",
        "rank",
        "local_rank",
        "gpu",
        "cuda",
        "device",
        "worker",
        "process",
        "proc",
        "task",
        "stage",
    ]
)
"""Words with which every line of a file may begin by itself."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a line's own prefix says of its writer. `task`: an srun label, a rank or the number of a node."""

    rank: int | None = None
    local: int | None = None
    task: int | None = None
    node: str = ""
    outer: int | None = None  #: the rank that a launcher put before torch's own: the local one, where they differ
    pid: int | None = None  #: of the process, as ray says it


NOBODY = Origin()


def plain(raw: bytes) -> str:
    """A line as text without what terminals would obey."""
    text = raw.decode("utf-8", "replace")
    text = without_escapes(text)
    return text.translate(_CONTROLS) if not text.isprintable() else text


def unwrapped(raw: bytes) -> list[bytes]:
    """The lines of a program that a collector put into this record of JSON; the record itself where it holds none."""
    if not raw.startswith(b'{"'):
        return [raw]
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return [raw]
    for _ in range(2):
        if isinstance(value, dict):
            value = next((value[name] for name in _LINE_UNDER if name in value), None)
    if not isinstance(value, str):
        return [raw]
    return value.encode("utf-8", "replace").splitlines() or [b""]


def is_glued(raw: bytes) -> bool:
    """Whether one line may be several: see `apart`."""
    heads = raw.count(b".cpp:")
    return heads > 1 or raw.find(b"[rank", 24) >= 0 or (heads > 0 and _has_bar(raw))


def apart(raw: bytes) -> list[bytes]:
    """The lines of which one was made where ranks print at once and an end of line comes late."""
    if not is_glued(raw):
        return [raw]
    return [line for part in _GLUED.split(raw) for line in (_BEHIND_BAR.split(part) if _has_bar(part) else [part])]


def _has_bar(raw: bytes) -> bool:
    return b"it/s" in raw or b"s/it" in raw


def columns(head: bytes) -> re.Pattern[str] | None:
    """What stands before every line of a file, by its beginning `head`: a name, the first group, and what follows it;
    or a quotation mark or spaces alone, with no name in that group.

    None where there is none, or where lines may begin alike by themselves.
    """
    lines = [line for line in head.split(b"\n")[:_MOST_LINES] if line.strip()]
    texts = [plain(line) for line in lines]
    lead = _lead(texts)
    texts = [split(text[len(lead) :])[1] for text in texts]
    pattern = ""
    for _ in range(2):
        found = [_COLUMN.match(text) for text in texts]
        names = {f[1] for f in found if f is not None}
        shapes, ends = {_shape(name) for name in names}, {f[2] for f in found if f is not None} - {""}
        if len(lines) < _LEAST_LINES or None in found or len(shapes) != 1 or len(ends) != 1:
            break
        (shape,), (end,) = shapes, ends
        if pattern:
            fits = len(names) == 1 and bool(_CONTAINER.match(shape)) and shape not in _TELLING
        else:
            fits = len(names) <= max(1, len(lines) // _SAME) and (bool(_NUMBERED.match(shape)) or end == "\t")
            hosts = len(names) == 1 or (shape.endswith("0:") and len(names) <= len(lines) // _SAME)
            fits = fits or (hosts and bool(_SPEAKER.match(shape)) and shape.rstrip("0:").lower() not in _TELLING)
        if not fits:
            break
        word = r"\d+".join(map(re.escape, shape.split("0"))).replace(
            re.escape(_ANY_REPLICA), f"(?:{'|'.join(REPLICAS)})"
        )
        pattern += f"({'?:' if pattern else ''}{word})(?:{re.escape(end)}|$)"
        texts = [text[f.end() :] for text, f in zip(texts, found, strict=True) if f is not None]
    if not (pattern or lead):
        return None
    return re.compile(f"(?:{re.escape(lead)}|{re.escape(lead.rstrip())}$){pattern or '()'}")


def _lead(texts: list[str]) -> str:
    """What a mail or an indented block puts before every line: ``> ``, or spaces."""
    if len(texts) < _LEAST_LINES:
        return ""
    if all(text.startswith("> ") or text == ">" for text in texts):
        return "> "
    return " " * min(len(text) - len(text.lstrip(" ")) for text in texts)


def _shape(name: str) -> str:
    return _REPLICA.sub(_ANY_REPLICA, re.sub(r"\d+", "0", name))


def split(text: str, column: re.Pattern[str] | None = None) -> tuple[Origin, str]:
    """The origin of a line and the line without its prefixes. Leading spaces of what is left stay: tracebacks.

    `column` is what `columns` found of the file.
    """
    rank = local = task = outer = pid = None
    node = ""
    for _ in range(_LAYERS):
        if not text or text[0] not in "[(<>`0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz":
            break
        if column is not None and (found := column.match(text)):
            node, column = node or found[1], None
        elif (found := _RANK.match(text)) and not text.startswith(_WATCHDOG_WORDS, found.end()):
            outer, rank = rank, int(found[1])
        elif found := _ROLE_RANK.match(text):
            local, rank = int(found[1]), int(found[2])
        elif found := _MPI.match(text):
            rank = int(found[1])
        elif (found := _ROLE.match(text)) and found[2].lower() not in ("step", "epoch", "iter", "iteration", "pg"):
            local, node = int(found[3]), found[1] or node
        elif task is None and rank is None and local is None and (found := _LABEL.match(text)):
            task = int(found[1])
        elif (found := _TIME.match(text)) or (found := _NUMBER.match(text)) or (found := _STREAM.match(text)):
            pass
        elif (found := _SYSLOG.match(text)) or (found := _ADDRESS.match(text)):
            node = node or found[1] or found[2]
        elif found := _PIPE.match(text):
            pass
        elif found := _RAY.match(text):
            node, pid = node or (found[2] or ""), int(found[1])
        elif found := _named(text):
            node = node or found[1]
        elif (found := _CLOCK.match(text) or _C10.match(text) or _QUOTED.match(text)) or (found := _logger(text)):
            pass
        else:
            break
        text = text[found.end() :]
    if rank is None and local is None and task is None and pid is None and not node:
        return NOBODY, text
    return Origin(rank, local, task, node, outer, pid), text


def _logger(text: str) -> re.Match[str] | None:
    """What a logger of Python puts before its words."""
    return _LOGGER.match(text) if text[0] in "DEIWC" or " - " in text[:72] else None


def _named(text: str) -> re.Match[str] | None:
    """A pod or a host before the line."""
    if text.startswith("[pod/") and (found := _POD.match(text)):
        return found
    if found := _STERN.match(text):
        return found
    found = _HOST.match(text)
    return found if found is not None and not _PY_WORD.search(found[1]) else None
