"""What the lines of all logs say, collected once and bounded: signs, progress, failure tables, facts of the job."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dtobs.logs import prefix, progress
from dtobs.logs.failure_table import Failed, FailureTable, begins_table
from dtobs.logs.places import LogPlace
from dtobs.logs.templates import GROUP, Role, has_digits, match, may_have_digits, says_nothing
from dtobs.logs.traces import STARTS, Raised, Trace, indentation, is_beheaded, rank_named

_KEPT = {
    "work-timeout": 64,
    "work-status": 64,
    "transport": 24,
    "exception": 12,
    "world": 3,
    "member": 4096,
    "completed": 8,
}
_KEPT_OTHERWISE = 8
_LATEST = "store-barrier-waits"
"""Lines that are printed every ten seconds: of each rank and barrier the latest counts, and how often it was said."""
_MAX_SIGNS = 400_000
_MAX_PAIRS = 100_000
_MAX_TEXT = 600
_LOSSES = 4096
_WORDS_OF_ANOTHER = frozenset({"segfault", "closing", "forced", "bare-exception", "device-assert", "nccl-cuda"})
"""Rows that say nothing of an exception: what its message may quote of another process, and that it is one."""
_STACK_OF_A_LOG = "Call stack:"
"""What Python's logging prints before the place of a line that it could not write."""
_DIGITS = b"0123456789"
_HEX = _DIGITS + b"abcdef"
_ALIKE, _TAKEN, _SHAPES, _SHAPED = 2000, 16, 4096, 400
"""Of lines that look alike but for their digits, of progress or such as say nothing, all but every sixteenth are left
after so many, later all but every sixty-fourth."""
OF_TORCH = "torch"
_WORKER_OF_RAY = re.compile(r"\(?(?:node_id=\w{1,80}, )?(?:ip=([\w.:]{1,60}), )?pid=(\d{1,9})\) world_rank=(\d{1,7})")
_NEVER_RAISED = ("Exception ignored in", "--- Logging error ---")
"""What Python prints before a traceback that goes nowhere."""
_FOLLOWS, _INDENT = 3, 2
_LAST_ERROR = "Last error:"
"""What NCCL's exceptions put before the line that tells what went wrong."""
_GOES_ON, _GOES_ON_WITHIN = 4, 200
"""Lines of its writer, and of all, within which half a message goes on."""
_UTC = re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")
_NCCL = re.compile(r"([\w.\-]{1,80}):(\d{1,9}):\d{1,9} \[(?:\d{1,4}|-1)\] ")
_COLLECTIVE_STACK = "Stack trace of the failed collective"
_COLLECTIVE_FRAME = re.compile(r"#\d{1,4} (?P<name>\S{1,120}) from (?P<file>[^:]{1,400}):(?P<line>\d{1,9})")
_FATAL, _FATAL_STACK = "Fatal Python error: ", "Current thread 0x"
_FATAL_LINES, _OF_FATAL = 400, (_FATAL_STACK, "Thread 0x", "File ", "Python runtime state: ")
_FATAL_FRAME = re.compile(r'File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9}) in (?P<name>\S{1,120})')
_SECTION = re.compile(r"-{4,40}(Begin|End) global rank (\d{1,7}) (?:STDOUT|STDERR|logs)-")  # MosaicML's Composer
_OF_ANOTHER = re.compile(r"Proxy Call|Task failed|[Ss]ocket|NET/|.{0,80}(?:remote|peer)")
"""How NCCL's last errors begin that tell of another process."""
_INSTALLED = re.compile(r"site-packages|dist-packages|/lib/python3|/torch/")


@dataclass(frozen=True, slots=True)
class Writer:
    """Who wrote: `kind` is rank, local, task, nccl (`node` is host:pid), process (of ray) or file; resolved to ranks at
    the end.

    A rank that stands after another one is torch's own (`node` is `OF_TORCH`).
    """

    kind: str
    number: int
    node: str = ""


@dataclass(frozen=True, slots=True)
class Sign:
    """A line that means something."""

    kind: str
    role: Role
    code: str
    writer: Writer
    fields: dict[str, str]
    text: str
    where: str  #: file:line
    order: int
    file: int
    rank: int | None = None  #: after `ranks.resolve`


@dataclass(slots=True)
class Track:
    """How far one writer trains: `seen` are (order, step) of the latest lines, oldest first.

    Where lines tell no step they are `counted`, and that number stands for it.
    """

    seen: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=64))
    file: int = 0
    counted: bool = False
    told_at: str = ""  #: what the latest line calls the time
    unscaled: bool = False  #: it says that the loss is multiplied by 1
    losses: deque[tuple[int, float, str]] = field(default_factory=lambda: deque(maxlen=_LOSSES))
    seconds: deque[tuple[int, float, str]] = field(default_factory=lambda: deque(maxlen=_LOSSES))
    norms: deque[tuple[int, float, str]] = field(default_factory=lambda: deque(maxlen=_LOSSES))

    @property
    def step(self) -> int | None:
        """The latest step told; None where none is."""
        return self.seen[-1][1] if self.seen and not self.counted else None

    def at(self, step: int) -> str:
        """What a number of its lines stands for: "step 7", or "report 7" where the lines are counted."""
        return f"{'report' if self.counted else 'step'} {step}"


class LogEvidence:
    """Takes lines in the order of each file; `hot` while the next line of any kind may matter."""

    def __init__(self) -> None:
        self.signs: list[Sign] = []
        self.tracks: dict[Writer, Track] = {}
        self.moved: dict[int, deque[tuple[int, int]]] = {}  #: file → (order, step) of its latest progress lines
        self.failures: list[Failed] = []
        self.writers: Counter[tuple[int, Writer]] = Counter()  #: (file, writer)
        self.files: dict[int, Counter[int]] = {}  #: file → explicit ranks in it
        self.tasks: set[tuple[int, int]] = set()  #: (task of the scheduler, rank) of one line
        self.outer: dict[int, set[tuple[int, int]]] = {}  #: file → (rank of the launcher, rank of torch) on one line
        self.pods: set[tuple[str, int]] = set()  #: (pod or host, rank) of one line
        self.nodes: dict[tuple[str, int], Counter[int]] = {}  #: (node, local rank) → ranks said beside it
        self.pids: dict[
            tuple[str, int], Counter[tuple[int, int]]
        ] = {}  #: (host, pid) → (size, rank) of its communicators
        self.attempts: list[int | None] = [None]  #: the last step of each attempt, as far as restarts are told
        self.attempt_of: dict[int, tuple[str, int]] = {}  #: file → (its node's folder, the attempt it is of)
        self.ends: dict[int, int] = {}  #: file → the number of its last line
        self.left_out = 0
        self._skipped: dict[bytes, tuple[int, int, bytes]] = {}  #: of lines that look alike the latest not read
        self._boring: Counter[bytes] = Counter()  #: lines without their digits, of progress or that say nothing
        self._nothing: dict[bytes, bool] = {}  #: those of which no row speaks; whether none can, whatever the digits
        self._idle: set[bytes] = set()  #: lines of NCCL that mean nothing, without the digits of their numbers
        self._dull: set[bytes] = set()  #: lines of transports inside a host, of which a file has told enough
        self._kept: Counter[tuple[str, Writer]] = Counter()
        self._repeated: dict[tuple[int, str, str], int] = {}  #: (file, rank, key) → its place in `signs`
        self._traces: dict[Writer, Trace] = {}
        self._announced: dict[Writer, int] = {}  #: the line that says of the next traceback that nobody gets it
        self._unsaid: dict[Writer, tuple[int, int, str]] = {}  #: (place in `signs`, line, ending) of half a message
        self._unsaid_until = 0  #: the line from which on nobody's message goes on
        self._stacks: dict[Writer, int] = {}  #: lines so far of a stack that is told
        self._fatal: set[Writer] = set()  #: whose stack has not yet come to the thread that failed
        self._table: FailureTable | None = None
        self._order = 0
        self._section: int | None = None  #: whose output a launcher repeats
        self._file, self._name, self._place = 0, "", LogPlace()
        self._head: Callable[[], bytes] | None = None  #: until it was asked
        self._column: re.Pattern[str] | None = None

    @property
    def hot(self) -> bool:
        """Whether a traceback, a stack or a table is open."""
        return bool(self._traces or self._stacks or self._unsaid) or self._table is not None

    def begin(self, file: int, name: str, place: LogPlace, head: Callable[[], bytes] = bytes) -> None:
        """Lines of another file follow; once there is one, `head` says how the file begins."""
        self.end()
        self._traces.clear()
        self._announced.clear()
        self._unsaid.clear()
        self._stacks.clear()
        self._fatal.clear()
        self._dull.clear()
        self._table = self._section = None
        self._file, self._name, self._place = file, name, place
        self._head, self._column = head, None
        self.attempt_of[file] = place.node, place.attempt

    def end(self) -> None:
        """The file is over: an open table counts as it is, and of lines left because they look alike, the last ones."""
        self._close_table(self._name)
        self.ends[self._file] = self._order
        now, latest = self._order, sorted(self._skipped.values())
        self._skipped.clear()
        for order, number, raw in latest:
            self._order = order
            origin, text = prefix.split(prefix.plain(raw), self._column)
            self._progress(self._writer(origin), text, f"{self._name}:{number}", raw)
        self._order = now

    def add_line(self, number: int, raw: bytes) -> None:
        """Read one line, or those that a collector or a lost line end made one."""
        if self._head is not None:
            self._column, self._head = prefix.columns(self._head()), None
        self._order += 1
        if self._unsaid and self._order > self._unsaid_until:
            self._unsaid.clear()
        shape = raw[:_SHAPED].translate(None, _DIGITS)
        if not self.hot:
            if shape in self._dull:
                return
            alike = self._boring[shape]
            if alike > _ALIKE and self._order % (_TAKEN if alike < 2 * _ALIKE else 4 * _TAKEN):
                self._skipped[shape] = self._order, number, raw
                return
        if raw.startswith(b'{"') or prefix.is_glued(raw):
            for whole in prefix.unwrapped(raw):
                for line in prefix.apart(whole):
                    self._order += 1
                    self._read(number, line, line[:_SHAPED].translate(None, _DIGITS))
        else:
            self._read(number, raw, shape)

    def _read(self, number: int, raw: bytes, shape: bytes) -> None:
        origin, text = prefix.split(prefix.plain(raw), self._column)
        writer = self._writer(origin)
        if "world_rank=" in text and (worker := _WORKER_OF_RAY.search(text)):
            for node in (worker[1] or "", ""):  # lines of the driver's own node come without an address
                self.pids.setdefault((node, int(worker[2])), Counter())[0, int(worker[3])] += 1
        nccl = _NCCL.match(text) if "NCCL" in text or ":" in text[:90] else None
        if nccl is not None:
            text = text[nccl.end() :]
            host = Writer("nccl", int(nccl[2]), nccl[1])
            writer = host if writer.kind == "file" else writer
        self.writers[self._file, writer] += 1
        where = f"{self._name}:{number}"
        if section := _SECTION.match(text):
            self._section = int(section[2]) if section[1] == "Begin" else None
            return
        if self._continues(writer, text, where):
            return
        if "Traceback" in text and any(start in text for start in STARTS):
            announced = self._announced.pop(writer, -_FOLLOWS - 1)
            ignored, before = number - announced <= _FOLLOWS, text[: text.index("Traceback")]
            lead = 0 if before.strip() else len(before)
            self._traces.setdefault(writer, Trace(rank_named(text), ignored=ignored, lead=lead))
            if "exitcode" not in before:
                return
            text = before  # of a paste that lost its line ends
        if any(words in text for words in _NEVER_RAISED):
            self._announced[writer] = number
            return
        if is_beheaded(text):
            lead = max(0, indentation(text) - _INDENT)
            self._traces.setdefault(writer, Trace(beheaded=True, lead=lead)).feed(text)
            return
        if text.startswith(_STACK_OF_A_LOG):
            self._traces.setdefault(writer, Trace(ignored=True, beheaded=True))
            return
        if text.startswith(_COLLECTIVE_STACK):
            self._stacks[writer] = 0
            return
        if text.startswith(_FATAL):
            self._stacks[writer] = 0
            self._fatal.add(writer)
        idle = raw.translate(None, _HEX) if text.startswith("NCCL INFO") and "environment" not in text else b""
        if idle in self._idle:
            return
        known = shape in self._nothing and len(raw) <= _SHAPED and not has_digits(text)
        found = None if known else match(text)
        if found is None:
            if not known and len(self._nothing) < _SHAPES and len(raw) <= _SHAPED and says_nothing(text):
                self._nothing[shape] = not may_have_digits(shape)
            told = self._progress(writer, text, where, raw)
            if told or self._nothing.get(shape):
                if shape in self._boring or len(self._boring) < _SHAPES:
                    self._boring[shape] += 1
            elif idle and len(self._idle) < _SHAPES:
                self._idle.add(idle)
            return
        row, fields = found
        if group := GROUP.search(text[:400]):
            fields |= {f"pg_{name}": value for name, value in group.groupdict().items() if value}
        if row.kind in ("nccl-init", "nccl-ready") and nccl is not None and "rank" in fields:
            self.pids.setdefault((nccl[1], int(nccl[2])), Counter())[int(fields["size"]), int(fields["rank"])] += 1
        sign = Sign(row.kind, row.role, row.code, writer, fields, text[:_MAX_TEXT], where, self._order, self._file)
        if not self._keep(sign) and row.kind == "transport" and "NET/" not in text and len(self._dull) < _SHAPES:
            self._dull.add(shape)

    def _writer(self, origin: prefix.Origin) -> Writer:
        place = self._place
        rank = next((r for r in (origin.rank, self._section, place.rank) if r is not None), None)
        local = origin.local if origin.local is not None else place.local
        node = origin.node or place.node
        if origin.local is not None and origin.task is not None:
            node = f"task{origin.task:07}"
        elif origin.local is not None and place.task is not None:
            node = f"task{place.task:07}"
        task = origin.task if origin.task is not None else place.task
        if rank is not None:
            if task is not None and len(self.tasks) < _MAX_PAIRS:
                self.tasks.add((task, rank))
            self.files.setdefault(self._file, Counter())[rank] += 1
            if local is not None:
                self.nodes.setdefault((node, local), Counter())[rank] += 1
            if origin.node and origin.local is None and len(self.pods) < _MAX_PAIRS:
                self.pods.add((origin.node, rank))
            if origin.outer is not None:
                self.outer.setdefault(self._file, set()).add((origin.outer, rank))
                return Writer("rank", rank, OF_TORCH)
            return Writer("rank", rank)
        if local is not None:
            return Writer("local", local, node)
        if task is not None:
            return Writer("task", task)
        if origin.pid is not None:
            return Writer("process", origin.pid, node)
        return Writer("file", self._file, node)

    def _continues(self, writer: Writer, text: str, where: str) -> bool:
        """Whether the line belongs to something that began before it."""
        if writer in self._unsaid:
            self._say(writer, text)
        if self._table is not None or begins_table(text):
            self._table = self._table or FailureTable()
            taken = self._table.feed(text)
            if not taken:
                self._close_table(where)
            if taken is not None:
                return True
        if writer in self._stacks:
            return self._stack(writer, text, where)
        trace = self._traces.get(writer)
        if trace is None:
            return False
        result = trace.feed(text)
        if isinstance(result, Raised):
            del self._traces[writer]
            if not trace.ignored:
                self._raised(writer if trace.rank is None else Writer("rank", trace.rank, OF_TORCH), result, where)
            return True
        if not result:
            del self._traces[writer]
            return False
        return not trace.strange

    def _close_table(self, where: str) -> None:
        entries = self._table.entries if self._table else []
        self.failures += [replace(f, where=where, order=self._order, file=self._file) for f in entries]
        self._table = None

    def _stack(self, writer: Writer, text: str, where: str) -> bool:
        """Whether the line belongs to a stack, the innermost frame first; the first of the user's own is kept."""
        line = text.strip()
        self._stacks[writer] += 1
        if writer in self._fatal:  # stacks of other threads come first
            if line.startswith(_FATAL_STACK) or self._stacks[writer] > _FATAL_LINES:
                self._fatal.discard(writer)
                self._stacks[writer] = 0
            return not line or line.startswith(_OF_FATAL)
        collective = _COLLECTIVE_FRAME.match(line)
        frame = collective or _FATAL_FRAME.match(line)
        if frame is None or self._stacks[writer] > 80:
            if line:
                del self._stacks[writer]
                return False
            return True
        if not _INSTALLED.search(frame["file"]):
            kind = "call-site" if collective else "fatal-site"
            fields = {"site": f"{frame['file']}:{frame['line']} in {frame['name']}"}
            self._keep(Sign(kind, Role.INFO, "", writer, fields, text[:_MAX_TEXT], where, self._order, self._file))
            del self._stacks[writer]
        return True

    def _raised(self, writer: Writer, raised: Raised, where: str) -> None:
        sign = sign_of(raised, writer, where, self._order, self._file)
        half = ":" if not raised.message or raised.message.endswith(":") else _LAST_ERROR
        if self._keep(sign) and (half == ":" or "NCCL error" in raised.message):
            self._unsaid[writer] = len(self.signs) - 1, 0, half
            self._unsaid_until = self._order + _GOES_ON_WITHIN

    def _say(self, writer: Writer, text: str) -> None:
        """Add to an exception what one of the next lines tells: of a message that ends in a colon, or NCCL's."""
        place, lines, half = self._unsaid.pop(writer)
        words = text.strip()
        first = half == ":" and not lines and not self.signs[place].fields["message"]
        if half == _LAST_ERROR and words == _LAST_ERROR:
            half = ""
        elif first and text[:1].isalnum() and self.signs[place].text.endswith(":"):
            half = ""  # its message begins with an end of line
        if words and words != _LAST_ERROR and (not half or (half == ":" and text[0] in " \t")):
            sign = self.signs[place]
            message = f"{sign.fields['message']} {words}".strip()[:_MAX_TEXT] if half else words[:_MAX_TEXT]
            self.signs[place] = replace(sign, fields=sign.fields | {"message": message})
            unheard = sign.role is Role.CASCADE and "NCCL error" in sign.text and match(words) is None
            if unheard and not _OF_ANOTHER.match(words):  # NCCL says what it stumbled over, and that is nobody else
                own = replace(self.signs[place], kind="exception", role=Role.ROOT, code="uncaught-exception")
                self.signs[place] = own
            if not half or words.endswith("."):
                return
        elif words and words != _LAST_ERROR and half != _LAST_ERROR:
            return
        if lines >= _GOES_ON:
            return
        self._unsaid[writer] = place, lines + 1, half

    def _progress(self, writer: Writer, text: str, where: str, raw: bytes) -> bool:
        told = progress.parse(text)
        if told is None or (told.step is None and told.loss is None and not told.counts):
            return False
        track = self.tracks.setdefault(writer, Track(file=self._file))
        if told.step is None:  # a Trainer's dictionary
            track.counted |= not track.seen
            told = replace(told, step=(track.seen[-1][1] if track.seen else 0) + track.counted)
        else:
            track.counted = False  # its bar, of which the dictionaries beside it are
        step = told.step or 0
        if track.seen and track.seen[-1][0] > self._order:
            return True
        if not track.counted:
            self.attempts[-1] = max(step, self.attempts[-1] or 0)
        if clock := _UTC.search(raw[:200]):
            track.told_at = clock[0].decode()
        if not track.seen or track.seen[-1][1] != told.step:
            track.seen.append((self._order, told.step or 0))
            self.moved.setdefault(self._file, deque(maxlen=256)).append((self._order, told.step or 0))
        if told.loss is not None:
            track.losses.append((told.step or 0, told.loss, where))
        if told.seconds is not None:
            track.seconds.append((told.step or 0, told.seconds, where))
        if told.norm is not None:
            track.norms.append((told.step or 0, told.norm, where))
            track.unscaled = told.unscaled
        return True

    def _keep(self, sign: Sign) -> bool:
        if sign.kind == "restart" and self.attempts[-1] is not None:
            self.attempts.append(None)
        key = (sign.kind, sign.writer)
        if sign.kind == _LATEST:
            who = (sign.file, sign.fields["rank"], sign.fields["key"])
            if (place := self._repeated.get(who)) is not None:
                times = int(self.signs[place].fields["times"]) + 1
                self.signs[place] = replace(sign, fields=sign.fields | {"times": str(times)})
                return True
            sign.fields["times"] = "1"
            if len(self._repeated) < _MAX_PAIRS:
                self._repeated[who] = len(self.signs)
                self.signs.append(sign)
            return True
        self._kept[key] += 1
        if self._kept[key] > _KEPT.get(sign.kind, _KEPT_OTHERWISE) or len(self.signs) >= _MAX_SIGNS:
            self.left_out += 1
            return False
        self.signs.append(sign)
        return True


def sign_of(raised: Raised, writer: Writer, where: str, order: int, file: int) -> Sign:
    """What an exception means: the row of the table that fits it, or a cause of its own."""
    found = match(raised.text)
    fields = {"type": raised.type, "message": raised.message[:_MAX_TEXT], "site": raised.site}
    if raised.communicates:
        fields["comm"] = "yes"
    kind, role, code = "exception", Role.ROOT, "uncaught-exception"
    lost_server = raised.client and found is not None and found[0].role is Role.CASCADE
    if found is not None and not (lost_server or found[0].role is Role.INFO or found[0].kind in _WORDS_OF_ANOTHER):
        kind, role, code = found[0].kind, found[0].role, found[0].code
        fields |= found[1]
    if raised.type == "TimeoutError" and "shm_broadcast" in raised.site:  # vLLM waits for its workers
        kind, role, code = "engine-rpc", Role.STUCK, ""
    if raised.launcher:
        role, code = Role.CASCADE, ""
    return Sign(kind, role, code, writer, fields, raised.text[:_MAX_TEXT], where, order, file)
