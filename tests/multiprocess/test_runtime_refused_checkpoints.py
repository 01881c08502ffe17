"""What cannot be resumed from is one line that says why, and the training's state stays as it was."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import flags, manifests, mesh, plan, resume
from runtime.data.tokens import prepare
from runtime.errors import CheckpointError
from runtime.trainer import make_trainer
from tests.harness import run_ranks
from tests.multiprocess.runtime_curves import SMALL, curves

MIXTURE = ("--preset", "debug-moe")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 2 and 4 of the debug model on two ranks, and the corpus they read."""
    folder = tmp_path_factory.mktemp("saved")
    text = folder / "text"
    text.mkdir()
    (text / "a.txt").write_text("".join(f"{n} times {n} is {n * n}, and so on.\n" for n in range(3000)))
    curves(
        *(2, folder / "run", "--parallel.shard", "2", "--data.path", str(text)),
        *("--steps", "4", "--checkpoint.every", "2"),
    )
    return folder


def ask(
    rank: int, world: int, asked: list[tuple[str, tuple[str, ...]]], arguments: tuple[str, ...], root: str
) -> list[tuple[str, bool]]:
    """For each (--resume, further flags): what was said, and whether the parameters and position stayed."""
    answers = []
    for target, more in asked:
        config = flags.load((*SMALL, *arguments, *more), {})
        layout = plan.resolve(config, world)
        made = make_trainer(config, layout, mesh.build(layout, "cpu"), torch.device("cpu"), prepare(config), Path(root))
        before = [parameter.detach().clone() for parameter in made.model.parameters]
        generator = torch.get_rng_state()
        try:
            said = resume.load(made, target)
        except CheckpointError as error:
            said = str(error)
        same = all(torch.equal(*pair) for pair in zip(before, made.model.parameters, strict=True))
        answers.append((said, same and made.step == 0 and torch.equal(generator, torch.get_rng_state())))
    return answers


def answers(
    saved: Path, asked: list[tuple[str | Path, tuple[str, ...]]], root: Path | None = None
) -> list[tuple[str, bool]]:
    arguments = ("--data.path", str(saved / "text"), "--data.cache", str(saved / "corpora"))
    (result,) = run_ranks(ask, 1, [(str(t), more) for t, more in asked], arguments, str(root or saved), timeout=120)
    return list(result.value)


def test_another_model_is_told_by_numbers_and_flags(saved: Path) -> None:
    folder = saved / "run/checkpoints/step-00000004"
    cases = {
        ("--model.dim", "64"): "--model.dim is 128 there and 64 here; use --model.dim 128",
        ("--model.layers", "2"): "--model.layers is 4 there and 2 here; use --model.layers 4",
        ("--model.layers", "6"): "--model.layers is 4 there and 6 here; use --model.layers 4",
        ("--model.heads", "8"): "--model.heads is 4 there and 8 here; use --model.heads 4",
        (
            "--model.rope_theta",
            "5e5",
        ): "--model.rope_theta is 10000 there and 500000 here; use --model.rope_theta 10000",
        (
            "--model.vocabulary",
            "600",
        ): "--model.vocabulary is 512 there and 600 here; use --model.vocabulary 512",
        MIXTURE: "--model.ffn is 384 there and 128 here, --model.experts is 0 there and 4 here;"
        " use --model.ffn 384 --model.experts 0",
    }
    found = answers(saved, [(folder, more) for more in cases])
    for (said, unharmed), expected in zip(found, cases.values(), strict=True):
        assert said == f"{folder} is a checkpoint of another model: {expected}"
        assert unharmed


def spoil(folder: Path, what: Callable[[Path], None]) -> Path:
    what(folder)
    return folder


def without_a_shard(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def with_a_flipped_bit(folder: Path) -> None:
    shard = folder / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def with_a_torn_manifest(folder: Path) -> None:
    text = (folder / manifests.NAME).read_text()
    (folder / manifests.NAME).write_text(text[: len(text) // 2])


def without_a_manifest(folder: Path) -> None:
    (folder / manifests.NAME).unlink()


class RunsCode:
    """A pickle that would make a file when it is loaded."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._target,)


def with_a_table_that_runs_code(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(RunsCode(folder / "ran")))
    reseal(folder)


def with_a_table_of_rubbish(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"rubbish")
    reseal(folder)


def reseal(folder: Path) -> None:
    """Whoever can write the folder can write its checksums."""
    found = manifests.read(folder)
    files = {**found.files, ".metadata": manifests.seal(folder / ".metadata")}
    (folder / manifests.NAME).write_text(manifests.encode(replace(found, files=files)))


BAD = {
    without_a_shard: "--resume {0}: {0}/__1_0.distcp cannot be read: No such file or directory",
    with_a_flipped_bit: "--resume {0}: {0}/__1_0.distcp is corrupt: its checksum is not the manifest's",
    with_a_torn_manifest: "--resume {0}: {0}/manifest.json cannot be read: ",
    without_a_manifest: "--resume {0}: {0} is no complete checkpoint: it has no manifest.json",
    with_a_table_that_runs_code: "{0}/.metadata is no table of contents: it names pathlib.Path.touch,",
    with_a_table_of_rubbish: "{0}/.metadata is no table of contents: ",
}


def test_a_bad_checkpoint_is_refused_by_name_and_passed_over_by_auto(saved: Path, tmp_path: Path) -> None:
    folders = []
    for number, what in enumerate(BAD):
        folder = tmp_path / str(number) / "step-00000004"
        shutil.copytree(saved / "run/checkpoints/step-00000004", folder)
        folders.append(spoil(folder, what))
    found = answers(saved, [(folder, ()) for folder in (*folders, tmp_path / "absent")])
    for (said, unharmed), folder, expected in zip(found, folders, BAD.values(), strict=False):
        assert said.startswith(expected.format(folder))
        assert "\n" not in said
        assert unharmed
    assert found[-1] == (f"--resume {tmp_path / 'absent'}: there is no such folder", True)
    assert not list(tmp_path.rglob("ran"))

    shutil.copytree(saved / "run/checkpoints/step-00000002", tmp_path / "0" / "step-00000002")
    ((said, _),) = answers(saved, [("auto", ())], root=tmp_path / "0")
    assert said.startswith(f"skipped a bad checkpoint: {folders[0]}/__1_0.distcp cannot be read")
    assert said.endswith(f"from {tmp_path}/0/step-00000002 after step 2")
    ((said, unharmed),) = answers(saved, [("auto", ())], root=tmp_path / "1")
    assert said == (f"no checkpoint in {tmp_path / '1'} can be trusted; start without --resume or remove them")
    assert unharmed


def test_another_corpus_is_noted_and_another_tokenizer_refused(saved: Path, tmp_path: Path) -> None:
    folder = saved / "run/checkpoints/step-00000004"
    tokens = Path(manifests.read(folder).training["tokens"])
    tokenizer = tokens / "tokenizer.json"
    (tmp_path / "b.txt").write_text("".join(f"the root of {n * n} is {n}; what follows?\n" for n in range(3000)))
    other = ("--data.path", str(tmp_path / "b.txt"))
    found = answers(saved, [(folder, (*other, "--data.tokenizer", str(tokenizer))), (folder, other)])
    assert found[0][0] == (
        "the corpus is another one than before: the data position does not carry over;"
        f" resumed into another layout from {folder} after step 4"
    )
    assert found[1] == (
        f"{folder} was trained with another tokenizer than this corpus has: the same numbers mean other text;"
        f" use --data.tokenizer {tokenizer}",
        True,
    )
