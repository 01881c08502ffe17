"""Settings: who wins, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime import flags
from runtime.config import Config, RunConfig
from runtime.errors import UsageError
from runtime.presets import PRESETS


def test_flag_wins_over_environment_over_file_over_preset_over_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "debug"\nsteps = 7\nseed = 8\n[data]\nbatch = 3\nsequence = 32\n')
    environment = {"DTOBS_TRAIN_SEED": "9", "DTOBS_TRAIN_DATA__BATCH": "5", "HOME": "/nowhere"}
    config = flags.load(["--config", str(file), "--data.batch", "6"], environment)
    assert config.data.batch == 6  # flag
    assert config.run.seed == 9  # environment
    assert (config.run.steps, config.data.sequence) == (7, 32)  # file
    assert config.model.dim == PRESETS["debug"]["model"]["dim"]  # preset
    assert config.optimizer.beta1 == 0.9  # default


def test_every_alias_means_a_setting() -> None:
    config = flags.load(
        [
            *("--preset", "debug", "--steps", "3", "--seed=4", "--accumulate", "2", "--precision", "bf16"),
            *("--run-dir", "somewhere", "--hang-timeout", "2.5", "--tui", "--resume", "--name", "x"),
        ],
        {},
    )
    run = config.run
    assert (run.preset, run.steps, run.seed, run.run_dir, run.hang_timeout, run.tui, run.name) == (
        *("debug", 3, 4, "somewhere", 2.5, True, "x"),
    )
    assert (config.data.accumulate, config.precision.compute, config.checkpoint.resume) == (2, "bf16", "auto")


def test_precision_can_be_a_word_or_a_table_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "word.toml").write_text('precision = "bf16"')
    (tmp_path / "table.toml").write_text('[precision]\ncompute = "bf16"')
    for name in ("word.toml", "table.toml"):
        assert flags.load(["--config", str(tmp_path / name)], {}).precision.compute == "bf16"


def test_resume_takes_a_path_or_nothing() -> None:
    assert flags.load(["--resume", "a/b"], {}).checkpoint.resume == "a/b"
    assert flags.load(["--resume", "--steps", "3"], {}).checkpoint.resume == "auto"


def test_booleans_need_no_value_but_accept_one() -> None:
    assert flags.load(["--parallel.reshard", "false", "--tui"], {}).parallel.reshard is False
    assert flags.load(["--parallel.zero1"], {}).parallel.zero1 is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "3"], "unknown setting --step (did you mean --steps?)"),
        (["--data.pth", "x"], "unknown setting --data.pth (did you mean --data.path?)"),
        (
            ["--learning_rate", "1"],
            "unknown setting --learning_rate (did you mean --optimizer.learning_rate?)",
        ),
        (
            ["--preset", "smal"],
            "no preset 'smal' (did you mean small?); there are debug, debug-moe, small, 1b, 8b",
        ),
        (["--steps", "many"], "--steps is 'many'; it must be a whole number"),
        (["--steps", "0"], "--run.steps is 0; it must be at least 1"),
        (["--steps"], "--steps needs a value"),
        (["train"], "unexpected argument 'train'; settings are --section.option VALUE (see --help)"),
        (["--precision", "fp4"], "--precision.compute is 'fp4'; it can be fp32, bf16, fp16, fp8"),
        (["--tui=maybe"], "--tui is 'maybe'; it must be true or false"),
        (
            ["--model.kv_heads", "3"],
            "--model.kv_heads 3 does not divide --model.heads 8; it can be 1, 2, 4, 8",
        ),
        (["--optimizer.beta1", "1.5"], "--optimizer.beta1 is 1.5; it must be below 1"),
        (["--optimizer.beta2", "1"], "--optimizer.beta2 is 1; it must be below 1"),
        (["--model.dropout", "1"], "--model.dropout is 1; it must be below 1"),
        (["--seed", str(2**64)], f"--run.seed is {2**64}; it must be at most {2**63 - 1}"),
        (
            ["--run.collective_timeout", "inf"],
            "--run.collective_timeout is inf; it must be a finite number",
        ),
        (
            ["--run.collective_timeout", "1e12"],
            "--run.collective_timeout is 1e+12; it must be at most 1e+09",
        ),
        (
            ["--optimizer.learning_rate", "nan"],
            "--optimizer.learning_rate is nan; it must be a finite number",
        ),
        (["--config", "absent.toml"], "cannot read the settings file absent.toml: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        flags.load(arguments, {})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[dta]\nbatch = 1", "unknown section [dta] (did you mean data?)"),
        ("[optimizer]\nlearning_rate = nan", "--optimizer.learning_rate is nan; it must be a finite number"),
        ("[data]\nbach = 1", "unknown setting"),
        ("[data]\nbatch = true", "data.batch is True; it must be a whole number"),
        ('[data]\nbatch = "4"', "data.batch is '4'; it must be a whole number"),
        ("steps = ", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        flags.load(["--config", str(file)], {})
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"unknown setting DTOBS_TRAIN_DATA__BACH \(did you mean data.batch\?\)"):
        flags.load([], {"DTOBS_TRAIN_DATA__BACH": "1"})


def test_help_names_every_setting() -> None:
    text = flags.help_text()
    for section, values in Config().as_dict().items():
        for name in values:
            assert f"--{section}.{name} " in text


def test_presets_are_valid_and_small_is_the_default() -> None:
    for name in PRESETS:
        flags.load(["--preset", name], {})
    assert flags.load([], {}) == flags.load(["--preset", "small"], {}) == Config(run=RunConfig())
