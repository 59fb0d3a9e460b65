"""FSDP2's two collectives where Gloo carries them: each rank sends its part straight to every other.

Gloo's own all-gather goes through a buffer and a copy more, and its reduce-scatter is an all-reduce of a copy, of
which all but one part is thrown away. Here nothing is sent twice, and the sum is in the order of the ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import P2POp, ProcessGroup
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin


class DirectAllGather(DefaultAllocMixin, AllGather):
    """Every rank's part, in order of ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """The input may be its own place in the output."""
        parts = list(output_tensor.chunk(group.size()))
        _swap([input_tensor] * group.size(), parts, group)
        if parts[group.rank()].data_ptr() != input_tensor.data_ptr():
            parts[group.rank()].copy_(input_tensor)


class DirectReduceScatter(DefaultAllocMixin, ReduceScatter):
    """The sum of every rank's input, added in order of ranks; each gets its part of it."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """The input stays as it is."""
        assert op == dist.ReduceOp.SUM, op
        mine = list(input_tensor.chunk(group.size()))
        parts = [torch.empty_like(output_tensor) for _ in mine]
        parts[group.rank()] = mine[group.rank()]
        _swap(mine, parts, group)
        torch.add(parts[0], parts[1], out=output_tensor)
        for part in parts[2:]:
            output_tensor.add_(part)


def _swap(give: Sequence[Tensor], take: Sequence[Tensor], group: ProcessGroup) -> None:
    """Send `give[r]` to each other rank r, and receive `take[r]` from it."""
    others = [(group.rank() + i) % group.size() for i in range(1, group.size())]
    receive = [P2POp(dist.irecv, take[r], group=group, group_peer=r) for r in others]  # first: data can go right there
    send = [P2POp(dist.isend, give[r], group=group, group_peer=r) for r in others]
    for work in dist.batch_isend_irecv([*receive, *send]):
        work.wait()
