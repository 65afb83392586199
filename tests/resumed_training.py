"""Training that is saved, loaded on a fresh model and continued, beside training that is not."""

import copy

import torch.distributed.checkpoint as dcp
from sharded_training import OPTIONS, adam, make, parameters, train
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ipslimit import BoundaryProbe
from ipslimit.nn import Recentring
from ipslimit.optim import SAGGS, GaugeAdamW, SBOAdamW, find_pairs


def sbo(centre):
    return lambda model: SBOAdamW(model, centre=centre, exclude="*.out_proj", **OPTIONS)


def saggs(inner):
    return lambda model: SAGGS(inner(model), find_pairs(model), every=3)


OPTIMIZERS = {
    "SBO, batch": sbo("batch"),
    "SBO, ema": sbo("ema"),
    "SAGGS": saggs(adam),
    "SAGGS of SBO, fixed": saggs(sbo("fixed")),
    "GaugeAdamW": lambda model: GaugeAdamW(model.parameters(), find_pairs(model), **OPTIONS),
    "AdamW, centred": adam,  # with a Recentring
}
FORMS = {
    "as it is": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
}


class Run:
    """A model, its optimizer, and what watches them."""

    def __init__(self, optimizer, sharded):
        centred = "centred" in optimizer
        self.model = make(sharded, centred)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.policy = Recentring(self.model, self.optimizer, every=2) if centred else None
        self.probe = BoundaryProbe(self.model, self.optimizer, every=2)

    def save(self, form):
        return get_state_dict(self.model, self.optimizer, options=FORMS[form])

    def load(self, saved, form):
        model, optimizer = saved
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=FORMS[form],
        )


def resumed(optimizer, form, sharded, folder=None):
    """(undisturbed, resumed) values after 4 and 3 steps; through files where there is a folder."""
    first = Run(optimizer, sharded)
    train(first.model, first.optimizer, range(4))
    saved = copy.deepcopy(first.save(form))
    policy = None if first.policy is None else first.policy.state_dict()
    train(first.model, first.optimizer, range(4, 7))
    second = Run(optimizer, sharded)
    if first.policy is not None:
        second.policy.load_state_dict(policy)
    if folder is not None:
        dcp.save(dict(zip(("model", "optimizer"), saved)), checkpoint_id=folder)
        loaded = dict(zip(("model", "optimizer"), second.save(form)))
        dcp.load(loaded, checkpoint_id=folder)
        saved = loaded["model"], loaded["optimizer"]
    second.load(saved, form)
    train(second.model, second.optimizer, range(4, 7))
    return parameters(first.model), parameters(second.model)
