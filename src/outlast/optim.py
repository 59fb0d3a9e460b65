"""The update: AdamW, the learning rate of a step, clipping by the global norm."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from outlast.config import Config, LRScheduler, Optimizer


def build_optimizer(params: Iterable[torch.nn.Parameter], config: Optimizer) -> torch.optim.Optimizer:
    """AdamW with its state made at once, so that state can be digested, saved and replaced from the start."""
    optimizer = torch.optim.AdamW(
        params,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def lr_factor(step: int, steps: int, config: LRScheduler) -> float:
    """Share of the peak learning rate at the step-th update (from 1), a pure function.

    Linear warm-up over `warmup_steps`, then linear or cosine decay that reaches `min_lr_factor` at the last
    step, or constant.
    """
    warmup = config.warmup_steps
    if step <= warmup:
        return step / warmup
    if config.decay_type == "constant":
        return 1.0
    done = (step - warmup) / max(1, steps - warmup)
    falling = 1 - done if config.decay_type == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr_factor + (1 - config.min_lr_factor) * falling


def learning_rate(step: int, config: Config) -> float:
    """Learning rate of the step-th update, from 1."""
    return config.optimizer.lr * lr_factor(step, config.training.steps, config.lr_scheduler)


_ROW = 4096


def sum_of_squares(flat: Tensor) -> float:
    """Sum of squares of a flat fp32 tensor, in a fixed order: the same bits with any number of threads.

    A plain reduction over all elements splits them among threads, and rounds by the split. Rows of fixed
    length don't: each is summed by one thread, then the few row sums in float64.
    """
    whole = flat.numel() // _ROW * _ROW
    norms = [torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).double()]
    if whole < flat.numel():
        norms.append(torch.linalg.vector_norm(flat[whole:].view(1, -1), dim=1).double())
    return math.fsum(torch.cat(norms).square().tolist())


def clip_(flat: Tensor, norm: float, max_norm: float) -> None:
    """Scale a flat gradient in place so that its L2 norm is at most `max_norm` (0: leave it)."""
    if max_norm and norm > max_norm:
        flat.mul_(max_norm / (norm + 1e-6))
