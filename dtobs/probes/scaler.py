"""Loss scaling by ``torch.amp.GradScaler``, understood without a report: the scale, and steps that it skips.

A scaler finds its scale by letting gradients overflow now and then; it then skips the optimizer's step. Such a step is
a step of the loop all the same, its gradients are those of the scaled loss, and its overflow is no error.

Gradients that are clipped while they are still multiplied by the scale are divided by it afterwards: of a norm of 1
that was wanted, a scale of 65,536 leaves 1.5e-5. It is written down after `IN_A_ROW` such steps. Who multiplies the
largest norm by the scale as well does right; so only largest norms that are far below the scale count.

Private torch: ``GradScaler._scale``, a tensor that may live on a device and is read without waiting; tried with 2.13.
"""

from __future__ import annotations

import math
from typing import Any

from torch.amp.grad_scaler import GradScaler

from dtobs.probes.base import Probe

IN_A_ROW = 4
"""Steps in which scaled gradients were clipped, before it is written down."""
FAR_BELOW = 64.0
"""How many times the scale is above the largest norm of a loop that forgot it."""


class Scaler(Probe):
    """Fills in ``loss_scale``, and ends the steps that a scaler skips; writes ``clipped_scaled`` of the process."""

    name = "scaler"
    about_model = False

    def install(self) -> None:
        self._known = False
        self._unscaled: set[int] = set()  # scalers that have divided gradients since their last update
        self._clipped: float | None = None  # the largest norm of gradients that no scaler has divided yet
        self._wrong = 0
        self.around(GradScaler, "scale", self._enabled, self._note)
        self.around(GradScaler, "step", self._before_step, self._after_step)
        self.around(GradScaler, "unscale_", self._before_unscaling, lambda _began: None)
        self.around(GradScaler, "update", self._before_update, lambda _began: None)
        clipping = self.guard(self._clipping)
        self.context.on_clipping.append(clipping)
        self.undo.callback(self.context.on_clipping.remove, clipping)

    def remove(self) -> None:
        """The loss is as it is."""
        self.context.loss_scale = None
        super().remove()

    def step_begin(self) -> None:
        """Until the loss is scaled in this step, it is not."""
        self.context.loss_scale = None

    def _enabled(self, scaler: Any, *_args: Any, **_named: Any) -> Any:
        if not scaler.is_enabled():
            return None
        if not self._known:
            self._known = True
            self.context.recorder.meta.add("process", loss_scaler=type(scaler).__name__)
        return scaler

    def _note(self, scaler: Any) -> None:
        """The scale of this step, once: `update` changes it after the optimizer has stepped."""
        context, scale = self.context, getattr(scaler, "_scale", None)
        if scale is None or context.loss_scale is not None:
            return
        step = context.step
        if scale.is_cpu:
            context.loss_scale = float(scale)
            self._write(step, context.loss_scale)
        else:
            copied = context.loss_scale = scale.detach().clone().reshape(())
            self.late.put(copied, lambda value: self._write(step, value.item()))

    def _write(self, step: int, scale: float) -> None:
        context = self.context
        if context.step != step:
            context.recorder.amend_step(step, loss_scale=scale)
        elif math.isnan(float(context.record["loss_scale"])):  # what the loop says of itself counts
            context.record["loss_scale"] = scale
        context.recorder.page.set(loss_scale=scale)

    def _before_step(self, scaler: Any, optimizer: Any, *_args: Any, **_named: Any) -> Any:
        if self._enabled(scaler) is None:
            return None
        self._note(scaler)  # of scalers whose `scale` is their own
        self._judge_clipping()
        return optimizer, self.context.progress.steps_seen

    def _after_step(self, token: Any) -> None:
        optimizer, before = token
        progress = self.context.progress
        watched = self.context.watched_optimizers()
        number = next((n for n, known in watched.items() if known is optimizer), None)
        if number is not None and progress.steps_seen == before:
            progress.optimizer_stepped(number, others=len(self.context.optimizers) > 1)  # it was skipped

    def _clipping(self, _parameters: Any, max_norm: Any) -> None:
        """Gradients are about to be clipped."""
        if self.context.loss_scale is None or self._unscaled or not isinstance(max_norm, (int, float)):
            return
        self._clipped = float(max_norm)

    def _before_unscaling(self, scaler: Any, *_args: Any, **_named: Any) -> None:
        if self._enabled(scaler) is not None:
            self._judge_clipping()
            self._unscaled.add(id(scaler))

    def _before_update(self, scaler: Any, *_args: Any, **_named: Any) -> None:
        self._unscaled.discard(id(scaler))

    def _judge_clipping(self) -> None:
        """Gradients are about to be divided by the scale; were they clipped before?"""
        norm, self._clipped = self._clipped, None
        scale, step = self.context.loss_scale, self.context.step
        if norm is None or scale is None or self._wrong >= IN_A_ROW:
            return

        def judge(value: float) -> None:
            self._wrong = self._wrong + 1 if value > FAR_BELOW * norm else 0
            if self._wrong == IN_A_ROW:
                self.context.recorder.meta.add("process", clipped_scaled=[step, norm, value])

        if isinstance(scale, float):
            judge(scale)
        else:
            self.late.put(scale.clone(), lambda found: judge(found.item()))
