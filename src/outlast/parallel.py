"""How a model is laid out over the ranks of its group: FSDP2, activation checkpointing, compilation.

Everything works on a model that is still on the meta device, block by block: a block is a member of any
`nn.ModuleList` of the model. Checkpointing and compiling wrap a block's `forward`, so names stay as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from outlast.collectives import DirectAllGather, DirectReduceScatter
from outlast.config import Config
from outlast.ranks import Ranks


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model, outermost first: what is sharded, recomputed and compiled as one."""
    out: list[nn.Module] = []
    for child in model.children():
        out += list(child) if isinstance(child, nn.ModuleList) else blocks(child)
    return out


def lay_out(model: nn.Module, config: Config, ranks: Ranks) -> None:
    """Wrap the blocks as the config asks, and shard the model among the ranks of its group, in place.

    Gradients of the ranks are added, not averaged: a unit's gradient is the sum over its sequences, whoever had them.

    Args:
        model: on the meta device, or with the same numbers on every rank.
        config: of the run.
        ranks: of the group. With one rank nothing is sharded.
    """
    for block in blocks(model):
        if config.activation_checkpoint.mode != "none":
            block.forward = _recomputing(block.forward, config.activation_checkpoint.mode)
        if config.compile.enable:
            block.forward = torch.compile(block.forward)
    if ranks.size == 1:
        return
    policy = MixedPrecisionPolicy()
    if config.training.mixed_precision_param == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    assert ranks.mesh is not None
    parts = blocks(model)
    for block in parts:
        again = config.parallelism.reshard_after_forward and block is not parts[-1]  # whose backward comes right after
        fully_shard(block, mesh=ranks.mesh, reshard_after_forward=again, mp_policy=policy)
    fully_shard(model, mesh=ranks.mesh, reshard_after_forward=False, mp_policy=policy)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if ranks.device.type == "cpu":
            module.set_custom_all_gather(DirectAllGather())
            module.set_custom_reduce_scatter(DirectReduceScatter())


def settle_shards(model: nn.Module) -> None:
    """After the initial numbers are in: from here on each parameter keeps its tensor, and its storage."""
    for module in _sharded(model):
        module.unshard()
        module.reshard()


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def _recomputing(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """A forward whose activations are made again in the backward: all, or all but the matrix products'."""
    context = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if mode == "selective" else {}
    return partial(checkpoint, forward, use_reentrant=False, **context)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE


_aten = torch.ops.aten
_DEAR = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What is kept: their recomputation costs most of a block's time."""


# --- Shards ----------------------------------------------------------------------------------------


def local(t: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; the whole of one that isn't sharded."""
    return t.to_local() if isinstance(t, DTensor) else t


def like(part: Tensor, whole: Tensor) -> Tensor:
    """A rank's part as the kind of tensor that `whole` is: a DTensor laid out like it, or the part itself."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def place(value: Tensor, at: Tensor, device: torch.device) -> Tensor:
    """A whole value, the same on every rank, laid out like a parameter, on a device. Nothing is sent."""
    if not isinstance(at, DTensor):
        return value.to(device)
    return distribute_tensor(value.to(device), at.device_mesh, at.placements, src_data_rank=None)
