"""Progress lines of training loops: which step, what loss, how long a step took.

Lightning, Accelerate, HF Trainer (a dict), DeepSpeed (``step=10``), Megatron (``iteration 10/ 1000 | …``), torchtitan,
tqdm bars and the plain ``step 10 loss 2.31`` of a thousand scripts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_NUMBER = r"[+-]?(?:\d{1,20}(?:,\d{3}){0,5}(?:\.\d{0,20})?(?:[eE][+-]?\d{1,3})?|nan|inf|NaN|Inf|infinity|NAN|INF)"
_STEP = re.compile(
    r"(?:\b(?:num_updates|global[_ ]step|global step|[Ss]teps?|STEP|[Ii]teration|[Ii]ter|ITER|(?<!/)it|batch|Batch)\b['\"\]]?\s{0,4}[:=#]?\s{0,4}[\[\"]?)(\d{1,3}(?:,\d{3}){1,4}|\d{1,12})(?![\d%])"
)
_BAR = re.compile(r"(?<!\d)(\d{1,12})/\d{1,12} \[[\d:?]{1,12}<")
_COUNTED = re.compile(
    r"(?:\]\s{0,3}|\b(?:[Ee]poch|Train):? \d{1,6}\s{1,3})\[\s{0,6}(\d{1,9})/\s{0,6}\d{1,9}(?: \(\s{0,4}[\d.]{1,6}%\))?\]"
    r"|\[(?:batch|step)=(\d{1,9})/\d{1,9}[\],]|\depoch:train:\d{1,9}-(\d{1,9})batch:"
)
"""``Epoch: [0][ 10/5005]`` of PyTorch's examples, ``Epoch(train) [1][ 50/1172]`` of MMEngine, ``Train Epoch: 1
[640/60000 (1%)]`` of MNIST, ``Train: 0 [ 50/1251 ( 4%)]`` of timm, Composer, OLMo and ESPnet."""
_EPOCH = re.compile(r"[^\w]{0,4}(?:GPU ?\d{1,5}\] )?[Ee]poch\b[^\w]{0,4}\d")
"""How a line begins that tells an epoch and no step."""
_PAIRS = re.compile(r"\bstep:\d{1,12} - [\w./\-@]{1,80}:\S{1,40} - ")
"""``step:3 - actor/pg_loss:0.01 - …`` of verl."""
_LOSS = re.compile(
    rf"(?<![\w/.])(?:(?:lm|train|training|train/|total|avg|average|mean|reduced_train)[_ /]?)?[Ll](?:oss|OSS)(?:_step)?(?:/train)?\b['\"\]]?\s{{0,4}}[:=]?\s{{0,4}}\[?['\"]?(?:tensor\()?({_NUMBER})(?![\w.]*[a-zA-Z%]{{2}})"
)
_NORM = re.compile(
    rf"\b[Gg]rad(?:ient)?[_ ][Nn]orm\b['\"]?\s{{0,4}}[:=]\s{{0,4}}['\"]?({_NUMBER})(?![\w.]*[a-zA-Z]{{2}})"
)
_SECONDS = (
    (re.compile(r"elapsed time per iteration \(ms\): ([\d.]{1,20})"), 1e-3),
    (
        re.compile(
            r"\b(?:step[_ ]time|time[_ /]per[_ ]step|iter_time|iter time|time/step)\s{0,4}[:=(s)]{1,5}\s{0,4}([\d.]{1,20}) ?(?!ms)s?\b"
        ),
        1.0,
    ),
    (re.compile(r"\b([\d.]{1,12}) ?ms/(?:step|it|iter)\b"), 1e-3),
    (re.compile(r"[,\[ ]([\d.]{1,12})s/it\b"), 1.0),
)
_RATE = re.compile(r"[,\[ ]([\d.]{1,12})it/s\b")
_UNSCALED = "loss scale: 1.0 "
_WORDS = ("oss", "teration", "it/s", "s/it", "[batch=", "[step=", "| Batchsize: ")
_NOT_TRAINING = re.compile(
    r"\b(?:[Vv]al(?:id|idation)?|[Ee]val(?:uation)?|[Tt]est|[Ss]anity|[Dd]ownload\w*|[Mm]ap|[Ff]ilter"
    r"|(?:[Gg]enerat|[Ll]oad|[Ww]rit|[Ss]av|[Tt]okeniz|[Ff]etch|[Pp]ack|[Tt]runcat|[Cc]onvert|[Bb]uild)ing)\b"
)


@dataclass(frozen=True, slots=True)
class LoggedProgress:
    """What a progress line says; None for what it does not."""

    step: int | None
    loss: float | None
    seconds: float | None
    norm: float | None = None  #: of the gradients
    unscaled: bool = False  #: no loss scaler is settling, as the line says
    counts: bool = False  #: another such line means that it goes on


def parse(text: str) -> LoggedProgress | None:
    """The progress told by a line, or None where it tells none."""
    if not any(word in text for word in _WORDS):
        return None
    text = text if len(text) <= 1024 else text[:1024] if text.startswith("step:") else text[-1024:]
    bar = _BAR.search(text) or _COUNTED.search(text)
    pairs = _PAIRS.search(text)
    found = _STEP.search(text[pairs.start() :] if pairs else text)
    of_epoch = _EPOCH.match(text) is not None and not _NOT_TRAINING.search(text)
    if of_epoch and "| Batchsize: " in text:  # of PyTorch's tutorial, which tells how many steps an epoch has
        return LoggedProgress(None, None, None, counts=True)
    step = int(found[1].replace(",", "")) if found else int(bar[bar.lastindex or 1]) if bar else None
    if step is None:
        loss = _LOSS.search(text) if of_epoch or text.lstrip().startswith("{'loss'") else None
        return None if loss is None else LoggedProgress(None, _value(loss[1]), None, _norm(text))
    if _NOT_TRAINING.search(text):
        return LoggedProgress(step if found else None, None, None)  # a bar of something else counts that
    loss = _LOSS.search(text)
    value = _value(loss[1]) if loss else None
    if loss is None and bar is None and pairs is None and not _SECONDS[0][0].search(text):
        return None
    return LoggedProgress(step, value, _seconds(text), _norm(text), _UNSCALED in text)


def _norm(text: str) -> float | None:
    found = _NORM.search(text)
    return _value(found[1]) if found else None


def _seconds(text: str) -> float | None:
    for pattern, unit in _SECONDS:
        if found := pattern.search(text):
            value = _value(found[1])
            return value * unit if value else None
    rate = _RATE.search(text)
    value = _value(rate[1]) if rate else None
    return 1 / value if value else None


def _value(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) or text.lower().lstrip("+-").startswith(("nan", "inf")) else None
