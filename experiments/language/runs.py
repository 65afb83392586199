"""One run: a language model of finite depth, or its limit, trained on windows of text."""

from __future__ import annotations

import math

import numpy as np
import torch

from ipslimit import ParticleRun, train_particles

from ..frame.progress import reporting_steps
from ..limit import solve_limit
from ..store import NUMBER, finite
from ..text.characters import CharacterWindows
from .plain import plain_run
from .sampling import write
from .setting import LanguageSetting

# What runs return, for reading it back; numbers that are not finite are text.
NUMBERS = [(*NUMBER, str)]
LIMIT_FORM = {
    "bits": NUMBERS,
    "error": NUMBERS,
    "x_error": (*NUMBER, str),
    "status": str,
    "message": str,
    "elements": int,
    "fields": int,
    "samples": [str],
}
LOSS_FORM = {"bits": [NUMBERS], "diverged": int}
RUN_FORM = LOSS_FORM | {"notes": [str], "fields": int, "samples": [str]}
PLAIN_FORM = {"bits": [NUMBERS], "parameters": int}
FORMS = {"limit": LIMIT_FORM, "size": RUN_FORM, "plain": PLAIN_FORM}
FORMS |= dict.fromkeys(("rate", "own", "rounding"), LOSS_FORM)


def bits(nats: object) -> np.ndarray:
    """Of a cross-entropy in nats."""
    return np.asarray(torch.as_tensor(nats).double().cpu()) / math.log(2.0)


def limit_run(text: CharacterWindows, setting: LanguageSetting, device: str) -> dict:
    """The limit.

    Returns
    -------
    dict
        "bits", "error": held-out loss in bits per character and its estimated error, by evaluated
        step; "x_error", "status", "message", "elements" of `LimitRun`; "fields": evaluations of a
        layer at one depth, of all grids together; "samples": a text for each prompt.
    """
    problem, rule = setting.model.make_problem(text), setting.model.make_rule()
    run = solve_limit(
        problem,
        rule,
        setting.model.steps,
        setting.tol,
        [setting.model.steps],
        device,
        elements=setting.elements,
        max_elements=setting.max_elements,
        evaluate=setting.evaluated,
    )
    found = {
        name: [float(bits(losses[k])) if k in losses else math.nan for k in setting.evaluated]
        for name, losses in (("bits", run.probe_loss), ("error", run.probe_loss_error))
    }
    found |= {"x_error": run.error, "status": run.status, "message": run.message}
    found |= {"elements": run.grid.elements, "fields": run.cost["field"]}
    found["samples"] = write(run, problem, setting, text) if run.status != "diverged" else []
    return finite(found)


def size_run(
    text: CharacterWindows, setting: LanguageSetting, device: str, depth: int, count: int | None
) -> dict:
    """All seeds of one (L, H); one answer for H = infinity, where `count` is None.

    Returns
    -------
    dict
        "bits": held-out loss in bits per character, a list a seed, by evaluated step; "diverged":
        number of seeds; "notes" of `ParticleRun`; "fields": evaluations of a layer on all seeds;
        "samples": a text for each prompt, by the first seed.
    """
    model, models = setting.model, setting.models
    problem = model.make_problem(text)
    seeds = 1 if count is None else models.seeds
    run = train_particles(
        problem,
        model.make_rule(),
        depth,
        count,
        model.steps,
        seeds,
        models.root_seed,
        [model.steps],
        device=device,
        evaluate=setting.evaluated,
        callback=reporting_steps(model.steps),
    )
    found = _losses(run, setting.evaluated) | {"notes": run.notes}
    found["fields"] = run.cost["field"]
    found["samples"] = [] if bool(run.diverged[0]) else write(run, problem, setting, text)
    return finite(found)


def loss_run(
    text: CharacterWindows,
    setting: LanguageSetting,
    device: str,
    depth: int,
    count: int,
    exponent: float = 1.0,
) -> dict:
    """The final held-out loss of the first seed of one (L, H), with residual factor L^-exponent.

    Returns
    -------
    dict
        "bits": a list with that of the seed in a list; "diverged".
    """
    model, steps = setting.model, (setting.model.steps,)
    run = train_particles(
        model.make_problem(text),
        model.make_rule(),
        depth,
        count,
        model.steps,
        1,
        setting.models.root_seed,
        (),
        exponent,
        device=device,
        evaluate=steps,
        callback=reporting_steps(model.steps),
    )
    return finite(_losses(run, steps))


def plain_model_run(
    text: CharacterWindows, setting: LanguageSetting, device: str, layers: int, lr: float
) -> dict:
    """The final held-out loss of a plain Transformer, with heads of size m as far as these fill d.

    Returns
    -------
    dict
        "bits": a list with that of the one seed in a list, NaN where training ended before;
        "parameters": their number.
    """
    model = setting.model
    problem = model.make_problem(text)
    warmup, floor = model.warmup, model.floor * lr / model.option("lr")
    constant = model.schedule == "constant"
    found = plain_run(
        problem.ids,
        problem.probes,
        problem.vocabulary,
        model.d,
        layers,
        model.d // model.m if model.d % model.m == 0 else 1,
        model.steps,
        problem.B,
        model.batch_seed,
        lr,
        0 if constant else warmup,
        lr if constant else floor,
        setting.plain.plain_decay,
        (model.steps,),
        setting.models.root_seed,
    )
    last = found["validation"][-1][1] if found["validation"] else math.nan
    return finite({"bits": [[float(bits(last))]], "parameters": found["parameters"]})


def _losses(run: ParticleRun, steps: tuple[int, ...]) -> dict:
    losses = np.stack([bits(run.probe_loss[k]) for k in steps], axis=1)
    return {"bits": losses.tolist(), "diverged": int(run.diverged.sum())}
