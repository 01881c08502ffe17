"""The command line: ``dtobs COMMAND``, one file of this folder a command.

A command is a module with a docstring (its help, first line its summary), ``configure(parser)`` and
``run(args) -> int``. A file that is here is a command; it is imported only when it is the one asked for. What a
command raises becomes an exit code here and nowhere else.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from enum import IntEnum
from importlib import import_module
from typing import NoReturn, Protocol

from dtobs import __version__
from dtobs.errors import DtobsError, UsageError, refusal

_THREADS = "OPENBLAS_NUM_THREADS"


class Exit(IntEnum):
    """What a command says to the shell; 130 and 141 are the shell's own for Ctrl-C and a closed pipe."""

    NOTHING_FOUND = 0
    ERROR = 1
    USAGE = 2
    WARNING = 3
    CRITICAL = 4
    INTERRUPTED = 130
    PIPE_CLOSED = 141


class Subcommand(Protocol):
    """The module of a command."""

    __doc__: str | None

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns an `Exit`."""


def commands() -> list[str]:
    """The names of all commands."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__) if m.name[0] != "_")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` defaults to the process's own arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # the shell closed it (>&-): nobody wants the output
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that does not speak UTF-8 gets question marks
    try:
        try:
            return _dispatch(arguments)
        except SystemExit as ending:  # argparse, after it has printed its help or its error
            return ending.code if isinstance(ending.code, int) else Exit.USAGE
        finally:
            _flush()
    except DtobsError as error:
        print(f"dtobs: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted. The interpreter would complain when it flushes at exit.
        _drop_output()
        return Exit.PIPE_CLOSED
    except OSError as error:
        print(f"dtobs: {refusal(error, error.filename or 'the command or its output')}", file=sys.stderr)
        return Exit.ERROR
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def _flush() -> None:
    """Write out what is printed: a closed pipe or a full disk shows here, and not at the interpreter's exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise DtobsError(refusal(error, "the output")) from error


def _drop_output() -> None:
    """Send what could not be written nowhere, for the interpreter flushes it again at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        parser = _top_parser()
        parser.parse_args(arguments)
        parser.print_help(sys.stderr)
        return Exit.USAGE
    name, rest = arguments[0], arguments[1:]
    module = _load(name)
    parser = command_parser(name, module)
    return int(module.run(parser.parse_args(rest)))


def _load(name: str) -> Subcommand:
    known = commands()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(known)}"
        raise UsageError(f"there is no command {name!r}; {hint}")
    with _one_thread():
        module: Subcommand = import_module(f"{__name__}.{name.replace('-', '_')}")
    return module


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Have numpy start no thread for each core, for no command uses its algebra; programs we start are not told."""
    if _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_THREADS]


class _Parser(argparse.ArgumentParser):
    """An argument parser that names the option which a misspelled one looks like."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split()
        if words and words[0].startswith("-") and not message.startswith(words[0]):
            known = [option for action in self._actions for option in action.option_strings]
            close = difflib.get_close_matches(words[0].partition("=")[0], known, n=1)
            message += f"; did you mean {close[0]!r}?" if close else ""
        super().error(message)


def command_parser(name: str, module: Subcommand) -> argparse.ArgumentParser:
    """The parser of one command: its help is the module's docstring as it is written."""
    parser = _Parser(
        prog=f"dtobs {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    return parser


def _top_parser() -> argparse.ArgumentParser:
    rows = [f"  {name:<12} {(_load(name).__doc__ or '').strip().splitlines()[0]}" for name in commands()]
    parser = argparse.ArgumentParser(
        prog="dtobs",
        usage="dtobs [--help] [--version] COMMAND …",
        description="Says which rank, which operation and which line of code made a distributed PyTorch job hang,\n"
        "diverge or crawl.\n\ncommands:\n" + "\n".join(rows),
        epilog="exit codes: 0 nothing found, 1 error, 2 usage, 3 warnings found, 4 critical found\n"
        "'dtobs COMMAND --help' shows a command's options and an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dtobs {__version__}")
    return parser
