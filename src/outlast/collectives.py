"""FSDP2's two collectives where Gloo carries them: each rank sends its part straight to every other.

Gloo's own all-gather goes through a buffer and a copy more, and its reduce-scatter is an all-reduce of a copy, of
which all but one part is thrown away. Here nothing is sent twice, and the sum is in the order of the ranks.
"""

from collections.abc import Sequence
from datetime import timedelta

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
    ) -> dist.Work:
        """The input may be its own place in the output. FSDP2 waits where it needs the weights."""
        parts = list(output_tensor.chunk(group.size()))
        if parts[group.rank()].data_ptr() != input_tensor.data_ptr():
            parts[group.rank()].copy_(input_tensor)
        return _Swap([input_tensor] * group.size(), parts, group)


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
        _Swap(mine, parts, group).wait()
        torch.add(parts[0], parts[1], out=output_tensor)
        for part in parts[2:]:
            output_tensor.add_(part)


class _Swap(dist.Work):
    """Sends `give[r]` to each other rank r, and receives `take[r]` from it."""

    def __init__(self, give: Sequence[Tensor], take: Sequence[Tensor], group: ProcessGroup) -> None:
        super().__init__()
        others = [(group.rank() + i) % group.size() for i in range(1, group.size())]
        ops = [P2POp(dist.irecv, take[r], group=group, group_peer=r) for r in others]  # first: data can go right there
        ops += [P2POp(dist.isend, give[r], group=group, group_peer=r) for r in others]
        self._flying = dist.batch_isend_irecv(ops)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until all is there, or the group's own time is over."""
        for work in self._flying:
            work.wait()
        return True
