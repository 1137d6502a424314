"""torch's optimizers without torch's compiler, which their methods import at the first call: a second of each process.

Removing the wrappers keeps the compiler out of the optimizer; no optimizer is compiled here. The rules are torch's.
"""

import inspect

import torch
from torch.optim import SGD, AdamW, Optimizer


class EagerOptimizer(Optimizer):
    """Base of every optimizer here."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)


class EagerAdamW(EagerOptimizer, AdamW):
    """AdamW of torch."""

    step = torch.no_grad()(inspect.unwrap(AdamW.step))


class EagerSGD(EagerOptimizer, SGD):
    """SGD of torch."""

    step = torch.no_grad()(inspect.unwrap(SGD.step))
