"""The frame of the command line, with commands of its own in a folder beside the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dtobs import __version__, cli
from dtobs.cli import main
from dtobs.findings import Finding, exit_code

COMMAND = '''
"""Does a thing.

example:
  dtobs do-it --now
"""
def configure(parser):
    parser.add_argument("--now", action="store_true")
    parser.add_argument("--fail")
def run(args):
    from dtobs import errors
    if args.fail == "interrupt":
        raise KeyboardInterrupt
    if args.fail:
        raise getattr(errors, args.fail)("what, where, what to do")
    print("now" if args.now else "later")
    return 3
'''


@pytest.fixture(autouse=True)
def _commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "do_it.py").write_text(textwrap.dedent(COMMAND))
    (tmp_path / "explode.py").write_text("raise AssertionError('imported although nobody asked for it')")
    monkeypatch.setattr(cli, "__path__", [str(tmp_path)])
    yield
    sys.modules.pop("dtobs.cli.do_it", None)


def test_runs_a_command_and_imports_no_other(capsys):
    assert cli.main(["do-it", "--now"]) == 3
    assert capsys.readouterr().out == "now\n"


@pytest.mark.parametrize("told", [None, "3"])
def test_algebra_gets_one_thread_unless_told_and_programs_that_a_command_starts_are_not_told(
    told, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if told:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", told)
    at_import = 'import os\nprint(os.environ["OPENBLAS_NUM_THREADS"])\n'
    in_run = '    import os\n    print(os.environ.get("OPENBLAS_NUM_THREADS"))\n'
    (tmp_path / "do_it.py").write_text(at_import + textwrap.dedent(COMMAND).replace("(args):\n", "(args):\n" + in_run))
    cli.main(["do-it"])
    assert capsys.readouterr().out.split()[:2] == [told or "1", str(told)]


def test_help_of_a_command_is_its_docstring(capsys):
    assert cli.main(["do-it", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Does a thing." in shown
    assert "example:\n  dtobs do-it --now\n" in shown


def test_help_lists_the_commands(tmp_path, capsys):
    (tmp_path / "explode.py").unlink()
    assert cli.main(["--help"]) == 0
    assert "  do-it        Does a thing.\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"), [("UsageError", 2), ("TargetError", 1), ("ServiceError", 1), ("RecordingError", 1)]
)
def test_errors_become_exit_codes_and_one_line(error, code, capsys):
    assert cli.main(["do-it", "--fail", error]) == code
    assert capsys.readouterr().err == "dtobs: what, where, what to do\n"


def test_unknown_command_gets_a_suggestion(capsys):
    assert cli.main(["do-itt"]) == 2
    assert capsys.readouterr().err == "dtobs: there is no command 'do-itt'; did you mean 'do-it'?\n"


def test_command_far_from_any_lists_them(capsys):
    assert cli.main(["zzz"]) == 2
    assert "the commands are do-it, explode" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["do-it", "--nonsense"], ["do-it", "--no"], ["--nonsense"], []])
def test_usage_errors_exit_2(arguments, tmp_path, capsys):
    (tmp_path / "explode.py").unlink()
    assert cli.main(arguments) == 2
    assert "usage: dtobs" in capsys.readouterr().err


def test_ctrl_c_is_no_traceback(capsys):
    assert cli.main(["do-it", "--fail", "interrupt"]) == 130
    assert capsys.readouterr().err == ""


def test_version(tmp_path, capsys):
    (tmp_path / "explode.py").unlink()
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"dtobs {__version__}\n"


def test_a_closed_pipe_is_quiet(tmp_path):
    code = f"import sys; from dtobs import cli; cli.__path__ = [{str(tmp_path)!r}]; sys.exit(cli.main(['do-it']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        command.stdout.close()
        assert command.stderr is not None
        assert command.stderr.read() == b""
        assert command.wait(30) == 141


def test_python_m_dtobs():
    done = subprocess.run([sys.executable, "-m", "dtobs", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dtobs {__version__}\n", "")


def test_exit_code_follows_the_worst_finding():
    warning = Finding("straggler", "slow")
    critical = Finding("rank-dead", "dead")
    assert [exit_code(f) for f in ([], [warning], [warning, critical])] == [0, 3, 4]


def test_a_misspelled_option_is_answered_with_the_one_it_looks_like(capsys):
    assert main(["do-it", "--nwo"]) == 2
    assert "unrecognized arguments: --nwo; did you mean '--now'?" in capsys.readouterr().err
    assert main(["do-it", "--frobnicate"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_terminal_that_does_not_speak_utf8_gets_question_marks():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "dtobs", "--help"], env=environment, capture_output=True, check=False)
    assert (done.returncode, b"COMMAND ?" in done.stdout, done.stderr) == (0, True, b"")
