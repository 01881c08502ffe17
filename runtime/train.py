"""The command: `torchrun --nproc-per-node N -m runtime.train [--config FILE] [--section.option VALUE ...]`.

Without torchrun it trains in one process. Exit codes: 0 trained, 1 failed, 2 the settings are wrong, 130 interrupted.
This is the one file of the package that knows dtobs; DTOBS_DISABLE=1 or an absent dtobs leaves the training as it is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # torch takes seconds to import: Ctrl-C meanwhile needs no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from runtime import elastic, flags, loop, mesh, phases, plan, pretrained, prove, resume, rundir, world
from runtime.config import Config
from runtime.data.tokens import agree_on, prepare
from runtime.errors import UsageError
from runtime.mesh import Layout
from runtime.process import SECONDS_TO_SPEAK, Process, say, warn
from runtime.progress import Progress, closing_lines, opening_lines
from runtime.trainer import Trainer, make_trainer
from runtime.world import RankPlace

if TYPE_CHECKING:
    from dtobs.session.session import Session


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if flags.wants_help(arguments):
        print(flags.help_text())
        return 0
    place = RankPlace()
    try:
        place = RankPlace.of(os.environ)
        config = flags.load(arguments, os.environ)
        layout = plan.resolve(config, place.size)
        if config.checkpoint.init:
            pretrained.check(config)
        process = Process(place, world.choose_device(config.run.device, place))
    except UsageError as error:
        if place.local_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:  # the launcher ends all when one has ended: leave the first the time to say it
            time.sleep(SECONDS_TO_SPEAK)
        return 2
    return process.run(lambda: train(process, config, layout))


def train(process: Process, asked: Config, layout: Layout) -> None:
    """The training of this rank, from joining the others to the last step."""
    joined = process.join(asked)
    run = rundir.resolve_run_dir(asked, joined)
    checkpoints = run.path / "checkpoints"
    process.redirect(rundir.make_rank_folder(run.path, process.place), run.path, tui=asked.run.tui)
    config = elastic.resolve_after_restart(asked, layout, checkpoints, restarted=run.restarted)
    config = plan.with_peak_flops(config, process.device)
    device_mesh = mesh.build(layout, process.device.type)
    session = observe(process, config, run.path, device_mesh)
    progress = Progress(say, steps=config.run.steps, peak_flops=config.run.peak_flops)
    if process.first:
        process.observers.callback(phases.listen(progress))
    with phases.phase("startup"):
        tokens = prepare(config)
        agree_on(tokens, joined)
        proof = prove.prove(config, layout, device_mesh, process.device, tokens) if config.run.prove else ""
        trainer = make_trainer(config, layout, device_mesh, process.device, tokens, checkpoints)
        resumed = resume.begin(trainer)
    if session is not None:
        watch(session, trainer)
    if process.first:
        notes = [proof, resumed, elastic.batch_note(asked, config, layout), process.restart_cost(trainer.step)]
        for text in opening_lines(trainer, tokens, run.path, notes):
            say(text)
        for text in elastic.warnings(os.environ, config):
            warn(text)
    loop.train(trainer)
    if process.first:
        process.last_words = closing_lines(progress.summary(trainer.step), run.path)


def observe(process: Process, config: Config, run_dir: Path, device_mesh: DeviceMesh) -> Session | None:
    """Attach dtobs to this rank until its observers are closed; None without dtobs."""
    if os.environ.get("DTOBS_DISABLE") == "1":
        return None
    try:
        import dtobs
        from dtobs.integrations import runtime as integration
    except ImportError as error:
        if process.first:
            warn(f"training without dtobs: {error}")
        return None
    session = dtobs.attach(
        run_dir=run_dir,
        name=config.run.name,
        mesh=device_mesh,
        config=config.as_dict(),
        hang_timeout=config.run.hang_timeout,
        on_hang=config.run.on_hang or None,
    )
    process.observers.callback(session.close)
    process.observers.callback(integration.observe(session, phases))
    process.restart_cost = lambda step: integration.restart_cost(session, step)
    # What runtime.seeds promises, so that a rank that breaks it is found.
    session.policy(equal={"seed": config.run.seed}, generators="differ")
    return session


def watch(session: Session, trainer: Trainer) -> None:
    """Let dtobs see the model, the optimizer, a pipeline, and the checkpoints that were not trusted."""
    parts, pipeline = trainer.model.parts, trainer.model.pipeline
    session.watch(parts[0] if len(parts) == 1 else nn.ModuleList(parts), trainer.optimizer)
    if pipeline is not None:
        session.watch_pipeline(pipeline.schedule)
    for path, why in trainer.refused.items():
        session.corrupt(str(path), why)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    world.exit_now(main())
