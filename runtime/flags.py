"""Reads settings: flag > environment > file > preset > default. Anything unknown is an error with a suggestion.

Flags      --section.option VALUE, --section.option=VALUE, and the aliases of ALIASES (--steps 100)
Environment  DTOBS_TRAIN_SECTION__OPTION, DTOBS_TRAIN_STEPS
File       TOML by --config: [section] tables, and the aliases at the top level
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_type_hints

from runtime.config import Config, section_name
from runtime.errors import UsageError
from runtime.presets import PRESETS, Values

ENVIRONMENT_PREFIX = "DTOBS_TRAIN_"

ALIASES: dict[str, str] = {
    "preset": "run.preset",
    "name": "run.name",
    "steps": "run.steps",
    "seed": "run.seed",
    "run-dir": "run.run_dir",
    "hang-timeout": "run.hang_timeout",
    "prove": "run.prove",
    "tui": "run.tui",
    "device": "run.device",
    "accumulate": "data.accumulate",
    "precision": "precision.compute",
    "resume": "checkpoint.resume",
}

_SECTIONS: dict[str, type] = {item.name: get_type_hints(Config)[item.name] for item in fields(Config)}
_OPTIONS: dict[str, Field[Any]] = {
    f"{section}.{item.name}": item for section, kind in _SECTIONS.items() for item in fields(kind)
}
_TYPES: dict[str, Any] = {
    f"{section}.{name}": hint for section, kind in _SECTIONS.items() for name, hint in get_type_hints(kind).items()
}


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """The settings that `arguments` (without the program's name), `environment` and the file they name ask for.

    Raises UsageError, one line, for an unknown name, a value of the wrong type, or a file that cannot be read.
    """
    flags, file = _from_flags(arguments)
    variables = _from_environment(environment)
    table = _from_file(Path(file)) if file else {}
    given: dict[str, Any] = {**table, **variables, **flags}
    preset = given.get("run.preset", "small")
    if preset not in PRESETS:
        raise UsageError(f"no preset {preset!r}{_suggestion(str(preset), PRESETS)}; there are {', '.join(PRESETS)}")
    return build(PRESETS[preset], given)


def build(preset: Values, given: Mapping[str, Any]) -> Config:
    """A Config of the `preset` with `given` (dotted name → value of the right type) on top."""
    sections: dict[str, dict[str, Any]] = {name: dict(preset.get(name, {})) for name in _SECTIONS}
    for dotted, value in given.items():
        section, name = dotted.split(".")
        sections[section][name] = value
    return Config(**{name: kind(**sections[name]) for name, kind in _SECTIONS.items()})


def wants_help(arguments: Sequence[str]) -> bool:
    """True where the arguments ask for help instead of a run."""
    return any(argument in ("-h", "--help") for argument in arguments)


def _from_flags(arguments: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    values: dict[str, Any] = {}
    file: str | None = None
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise UsageError(f"unexpected argument {argument!r}; settings are --section.option VALUE (see --help)")
        flag, has_value, text = argument[2:].partition("=")
        if flag == "config":
            file = text if has_value else _next_value("--config", rest)
            continue
        dotted = _resolve(flag.replace("_", "-"), flag, f"--{flag}", prefix="--")
        if not has_value:
            if _TYPES[dotted] is bool:
                text = rest.pop(0) if rest and rest[0].lower() in _BOOLEANS else "true"
            elif dotted == "checkpoint.resume" and (not rest or rest[0].startswith("--")):
                text = "auto"
            else:
                text = _next_value(f"--{flag}", rest)
        values[dotted] = _parse(text, dotted, f"--{flag}")
    return values, file


def _next_value(flag: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise UsageError(f"{flag} needs a value")
    return rest.pop(0)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            dotted = _resolve(name.replace("_", "-"), name.replace("__", "."), variable, prefix="")
            values[dotted] = _parse(text, dotted, variable)
    return values


def _from_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            if key not in _SECTIONS:
                raise UsageError(f"{path}: unknown section [{key}]{_suggestion(key, _SECTIONS)}")
            for name, item in value.items():
                dotted = _resolve("", f"{key}.{name}", f"{path}: {key}.{name}", prefix="")
                values[dotted] = _typed(item, dotted, f"{path}: {key}.{name}")
        else:
            dotted = _resolve(key.replace("_", "-"), key, f"{path}: {key}", prefix="")
            values[dotted] = _typed(value, dotted, f"{path}: {key}")
    return values


def _resolve(alias: str, dotted: str, shown: str, *, prefix: str) -> str:
    """The dotted name meant by an alias or a dotted name; `shown` is how the user wrote it."""
    if alias in ALIASES:
        return ALIASES[alias]
    section, _, name = dotted.partition(".")
    canonical = f"{section}.{name.replace('-', '_')}"
    if canonical in _OPTIONS:
        return canonical
    names = [*_OPTIONS, *ALIASES, "config"]
    raise UsageError(f"unknown setting {shown}{_suggestion(dotted, names, prefix)}")


def _suggestion(word: str, names: Iterable[str], prefix: str = "") -> str:
    names = list(names)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if not close:  # a bare option name, written without its section
        close = [name for name in names if name.rpartition(".")[2] == word.rpartition(".")[2]][:1]
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _parse(text: str, dotted: str, shown: str) -> Any:
    """The value of a flag or variable, from its text."""
    kind = _TYPES[dotted]
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise UsageError(f"{shown} is {text!r}; it must be true or false")
        return _BOOLEANS[text.lower()]
    if kind is str:
        return text
    if text == "" and type(None) in getattr(kind, "__args__", ()):
        return None
    whole = int in getattr(kind, "__args__", (kind,))
    try:
        return int(text.replace("_", "")) if whole else float(text)
    except ValueError:
        raise UsageError(f"{shown} is {text!r}; it must be {'a whole number' if whole else 'a number'}") from None


def _typed(value: Any, dotted: str, shown: str) -> Any:
    """The value of a TOML entry, checked against the setting's type."""
    kind = _TYPES[dotted]
    accepted = getattr(kind, "__args__", (kind,))
    if float in accepted and type(value) is int:
        return float(value)
    if type(value) not in accepted:
        wanted = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}[accepted[0]]
        raise UsageError(f"{shown} is {value!r}; it must be {wanted}")
    return value


def help_text() -> str:
    """The text of --help: every setting with its default and unit."""
    lines = [
        "usage: torchrun --nproc-per-node N -m runtime.train [--config FILE.toml] [--section.option VALUE ...]",
        "",
        "Trains a Llama-style transformer. Example:",
        "  torchrun --standalone --nproc-per-node 2 -m runtime.train --preset debug --parallel.shard 2",
        "",
        f"A flag wins over {ENVIRONMENT_PREFIX}SECTION__OPTION, that over the file, that over the preset"
        f" ({', '.join(PRESETS)}).",
        "Defaults below are those of the preset 'small'.",
        "Short forms: " + ", ".join(f"--{alias}" for alias in ALIASES) + ", --config.",
    ]
    for section, kind in _SECTIONS.items():
        assert section == section_name(kind)
        lines += ["", f"{section}: {(kind.__doc__ or '').splitlines()[0]}"]
        for item in fields(kind):
            meta = item.metadata
            default = {None: "empty", "": "empty", True: "true", False: "false"}.get(item.default, item.default)
            if isinstance(item.default, (int, float)) and not isinstance(item.default, bool):
                default = f"{item.default:g}" if isinstance(item.default, float) else str(item.default)
            notes = [f"default {default}"]
            notes += [meta["unit"]] if meta["unit"] else []
            notes += [" | ".join(meta["choices"])] if meta["choices"] else []
            lines.append(f"  --{section}.{item.name:<20} {meta['help']} [{'; '.join(notes)}]")
    return "\n".join(lines)
