"""Python tracebacks as they come, line by line and perhaps between the lines of others.

A `Trace` follows one writer. It ends at the first line that is not indented: the exception. Of a chain ("During
handling…", "direct cause") every exception is handed out; the caller knows which of them is a consequence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

START = "Traceback (most recent call last):"
STARTS = (START, "Traceback (most recent call last) ─", "Traceback (most recent call last) --")
"""The first line of a traceback: as Python prints it, and as `rich` does, which draws a box around it."""
_BOX = ("│", "╭", "╰", "|", "+-")
_BOXED = re.compile(r"[│|]\s{1,4}(?P<file>[^\s:│|]{1,400}\.pyx?):(?P<line>\d{1,9})(?: in (?P<name>[^\s│|]{1,120}))?")
_FRAME = re.compile(
    r"\s{0,12}[|+\- ]{0,6}File \"(?P<file>[^\"]{1,400})\", line (?P<line>\d{1,9})(?:, in (?P<name>\S{1,120}))?"
)
_ALONE = re.compile(r"\s{2,6}File \"[^\"]{1,400}\", line \d{1,9}(?:, in \S{1,120})?$")
_EXCEPTION = re.compile(
    r"(?P<type>[A-Za-z_][\w]{0,80}(?:\.[A-Za-z_<>]\w{0,80}>?){0,8})(?::(?: (?P<message>.{0,2000}))?)?$"
)
_GROUPED = re.compile(r"\s{1,40}\| (?=\S)")
"""What Python puts before the exceptions of a group; frames and notes of them are indented further."""
_INSTALLED = re.compile(
    r"(?:site-packages|dist-packages|/lib/python3|<frozen|<string>|/torch/(?:distributed|nn|optim|_dynamo|utils|cuda|autograd|multiprocessing|amp|_inductor)/"
    r"|/(?:torchrun|accelerate|deepspeed)$|/dtobs/(?:probes|session|integrations)/)"
)
_LAUNCHERS = re.compile(r"torch/distributed/run\.py|accelerate/commands|torch_xla/distributed/xla_dist\.py")
_COMMUNICATION = re.compile(r"/torch/(?:distributed|_C)/|/deepspeed/comm/")
_CLIENT = re.compile(r"/(?:urllib3|urllib|requests|httpx|httpcore|http|aiohttp|botocore|boto3|s3fs|gcsfs|fsspec)[/.]")
_OF_RANK = re.compile(r"most recent call last\): \(RANK (\d{1,7})\)")
_MAX_LINES = 600
_MAX_STRANGERS = 60


@dataclass(slots=True)
class Raised:
    """An exception with the user's own innermost frame (`site`), as ``train.py:31 in step``."""

    type: str
    message: str
    site: str
    launcher: bool  #: raised in the launcher (torchrun, accelerate), not in a rank
    communicates: bool  #: raised inside torch.distributed
    text: str
    client: bool = False  #: raised below a client of HTTP: it lost a server, and no peer


class Trace:
    """One traceback that is being read."""

    def __init__(self, rank: int | None = None, ignored: bool = False, beheaded: bool = False, lead: int = 0) -> None:
        self._lead = " " * lead  #: what a quoted block puts before each line
        self.rank = rank  #: who raised it, where its first line names somebody: `rank_named`
        self.ignored = ignored  #: nobody gets it, and the process goes on
        self._patience = 0 if beheaded else _MAX_STRANGERS
        self.strange = False  #: the last line was somebody else's
        self._own = self._any = ""
        self._indent = -1  #: of the last frame
        self._launcher = self._communicates = self._client = False
        self._lines = self._strangers = 0

    def feed(self, text: str) -> Raised | bool:
        """Take a line: True while it goes on, the exception at its end, False where it is no traceback any more."""
        self._lines += 1
        text = text.removeprefix(self._lead)
        follows, self.strange = not self.strange, False
        if self._lines > _MAX_LINES:
            return False
        if frame := _FRAME.match(text) or _BOXED.match(text):
            place = f"{frame['file']}:{frame['line']}" + (f" in {frame['name']}" if frame["name"] else "")
            self._any, self._indent = place, indentation(text)
            self._communicates = bool(_COMMUNICATION.search(frame["file"]))
            self._client |= bool(_CLIENT.search(frame["file"]))
            if not _INSTALLED.search(frame["file"]):
                self._own = place
            spawns = frame["name"] == "join" and frame["file"].endswith("torch/multiprocessing/spawn.py")
            stopped = frame["name"] == "sigkill_handler"  # DeepSpeed's launcher
            self._launcher |= spawns or stopped or bool(_LAUNCHERS.search(frame["file"]))
            self.ignored |= frame["name"] == "_exit_barrier"  # torchrun's own, which logs it and is done
            return True
        if grouped := _GROUPED.match(text):
            text = text[grouped.end() :]
            if text.startswith(("ExceptionGroup", "BaseExceptionGroup")):
                return True
        if (
            not text.strip()
            or (text[0] in " \t" and not self._is_quoted(text))
            or text.startswith((*STARTS, "  |", "[Previous line repeated", "^", *_BOX))
        ):
            return True
        found = _EXCEPTION.match(text.strip()[:2200])
        if found is None or not (
            _looks_like_type(found["type"]) or (follows and found["message"] and self._any and self._patience)
        ):
            self.strange = True
            self._strangers += 1
            return self._strangers < self._patience
        return Raised(
            found["type"],
            found["message"] or "",
            self._own or self._any,
            self._launcher,
            self._communicates,
            text.strip(),
            self._client,
        )

    def _is_quoted(self, text: str) -> bool:
        """Whether a line that is indented no further than the frames is the exception, of a block that was quoted."""
        found = _EXCEPTION.match(text.strip()[:2200]) if indentation(text) <= self._indent else None
        return found is not None and _looks_like_type(found["type"])


def is_installed(site: str) -> bool:
    """Whether a place is in a library, not in the user's own files."""
    return _INSTALLED.search(site) is not None


def is_beheaded(text: str) -> bool:
    """Whether a traceback begins with this line: a paste that lost the first, or a syntax error, which has none."""
    return _ALONE.match(text) is not None


def indentation(text: str) -> int:
    """How many spaces a line begins with."""
    return len(text) - len(text.lstrip(" "))


def rank_named(text: str) -> int | None:
    """The rank whose exception it is: a checkpoint's, which every rank prints, begins ``Traceback (…): (RANK 3)``."""
    found = _OF_RANK.search(text)
    return None if found is None else int(found[1])


def _looks_like_type(name: str) -> bool:
    last = name.rpartition(".")[2]
    endings = ("Error", "Exception", "Exit", "Interrupt", "Iteration", "Warning")
    return last[:1].isupper() and not last.isupper() and last.endswith(endings)
