"""The update is a pure function: of the step for its rate, of the gradient for its norm."""

import dataclasses
import itertools
import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.config import Config, LRScheduler, Optimizer
from outlast.optim import build_optimizer, clip_, learning_rate, lr_factor, sum_of_squares

DECAYS: tuple[Literal["linear", "cosine", "constant"], ...] = ("linear", "cosine", "constant")

schedules = st.builds(
    LRScheduler,
    warmup_steps=st.integers(0, 300),
    decay_type=st.sampled_from(DECAYS),
    min_lr_factor=st.floats(0, 1),
)


# --- Learning rate ---------------------------------------------------------------------------------


@given(schedules, st.integers(1, 400))
def test_the_rate_warms_up_in_a_line_and_ends_at_its_least(config: LRScheduler, steps: int):
    warmup = config.warmup_steps
    for step in range(1, min(warmup, steps) + 1):
        assert lr_factor(step, steps, config) == step / warmup
    if steps > warmup:
        least = 1.0 if config.decay_type == "constant" else config.min_lr_factor
        assert lr_factor(steps, steps, config) == pytest.approx(least, abs=1e-12)


@given(schedules, st.integers(1, 400))
def test_the_rate_has_no_jump_and_stays_in_its_range(config: LRScheduler, steps: int):
    found = [lr_factor(step, steps, config) for step in range(1, steps + 1)]
    assert all(0 < f <= 1 + 1e-12 or config.min_lr_factor == 0 for f in found)
    falling = found[config.warmup_steps :]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(falling))
    most = 1 / config.warmup_steps if config.warmup_steps else 0
    if steps > config.warmup_steps:
        most = max(most, math.pi / 2 / (steps - config.warmup_steps))  # the cosine at its steepest
    assert all(abs(a - b) <= most + 1e-12 for a, b in itertools.pairwise(found))


def test_half_way_down_is_half_way_between():
    for decay in ("linear", "cosine"):
        config = LRScheduler(warmup_steps=10, decay_type=decay, min_lr_factor=0.2)
        assert lr_factor(60, 110, config) == pytest.approx(0.6)


def test_the_rate_depends_on_nothing_but_the_step():
    """Case C3: a healed group's schedule has no state that could be left behind."""
    config = Config()
    in_order = [learning_rate(step, config) for step in range(1, 201)]
    backwards = [learning_rate(step, config) for step in range(200, 0, -1)]
    assert in_order == backwards[::-1]
    assert max(in_order) == config.optimizer.lr == in_order[config.lr_scheduler.warmup_steps - 1]
    twice = dataclasses.replace(config, optimizer=Optimizer(lr=2 * config.optimizer.lr))
    assert [learning_rate(step, twice) for step in range(1, 201)] == [2 * lr for lr in in_order]


# --- AdamW -----------------------------------------------------------------------------------------


def steps_of(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int) -> None:
    """Some updates with gradients that differ each time."""
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()


def test_state_made_at_once_is_what_torch_makes_later():
    """State that exists from step 0 can be digested, saved and healed; it must not change the updates."""

    def fresh() -> list[nn.Parameter]:
        g = torch.Generator().manual_seed(0)
        return [nn.Parameter(torch.randn(s, generator=g)) for s in ((5, 3), (7,))]

    config = Optimizer(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    ours, theirs = fresh(), fresh()
    eager = build_optimizer(ours, config)
    settings_: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3, "fused": True}
    lazy = torch.optim.AdamW(theirs, **settings_)
    assert all(set(eager.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in ours)
    assert not any(v.any() for p in ours for v in eager.state[p].values())
    steps_of(eager, ours, 4)
    steps_of(lazy, theirs, 4)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert eager.state[a].keys() == lazy.state[b].keys()
        for key, value in lazy.state[b].items():
            assert (eager.state[a][key].dtype, eager.state[a][key].shape) == (value.dtype, value.shape)
            assert torch.equal(eager.state[a][key], value)


def test_adamw_is_the_paper():
    """Loshchilov and Hutter (arXiv 1711.05101), algorithm 2, in float64 by hand."""
    config = Optimizer(lr=0.02, beta1=0.7, beta2=0.8, eps=1e-4, weight_decay=0.5)
    p = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = build_optimizer([p], config)
    w, m, v = [1.0, -2.0, 0.5], [0.0] * 3, [0.0] * 3
    for t in range(1, 6):
        grad = [0.3 * t, -1.0, 2.0 / t]
        p.grad = torch.tensor(grad)
        optimizer.step()
        for i, g in enumerate(grad):
            m[i] = 0.7 * m[i] + 0.3 * g
            v[i] = 0.8 * v[i] + 0.2 * g * g
            step = m[i] / (1 - 0.7**t) / (math.sqrt(v[i] / (1 - 0.8**t)) + 1e-4)
            w[i] -= 0.02 * (step + 0.5 * w[i])
    assert p.tolist() == pytest.approx(w, rel=1e-5)


# --- Norm and clipping -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 300_001])
def test_the_norm_has_the_same_bits_with_any_number_of_threads(size: int):
    """Several tensors: a plain sum's bits differ for about every second one."""
    before = torch.get_num_threads()
    for seed in range(8 if size > 1e5 else 1):
        flat = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e-3
        found = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(sum_of_squares(flat))
        torch.set_num_threads(before)
        assert len(found) == 1
        assert found.pop() == pytest.approx(flat.double().square().sum().item(), rel=1e-5)


def test_the_norm_does_not_depend_on_where_the_gradient_lies():
    """Memory alignment decides how a vectorised sum is cut."""
    source = torch.randn(10_000, generator=torch.Generator().manual_seed(2))
    found = set()
    for offset in range(8):
        home = torch.empty(10_000 + offset)
        home[offset:].copy_(source)
        found.add(sum_of_squares(home[offset:]))
    assert len(found) == 1


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_the_norm_of_a_gradient_that_is_not_finite_is_not(value: float):
    flat = torch.zeros(5000)
    flat[4999] = value
    assert not math.isfinite(sum_of_squares(flat))


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
@settings(max_examples=40)
def test_clipping_keeps_the_direction_and_bounds_the_norm(size: float, max_norm: float):
    flat = torch.tensor([3.0, -4.0, 0.0]) * (size / 5)
    before, norm = flat.clone(), sum_of_squares(flat) ** 0.5
    clip_(flat, norm, max_norm)
    if norm <= max_norm:
        assert torch.equal(flat, before)
    else:
        assert float(flat.norm()) <= max_norm * (1 + 1e-6)
        assert torch.allclose(flat, before * (max_norm / norm), rtol=2e-3)


def test_a_bound_of_zero_never_clips():
    flat = torch.full((3,), 1e6)
    clip_(flat, sum_of_squares(flat) ** 0.5, 0.0)
    assert (flat == 1e6).all()
