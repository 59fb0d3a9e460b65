"""The sums of a step's work units: gradients, loss, tokens, and which units are in them.

`ExactSums` adds in 64-bit integers. Integer addition is associative, so the sum has the same bits in any
order and any grouping, whoever computed the units. `FloatSums` adds in fp32: same samples, float rounding.

Both keep a *ledger* beside the gradients: how often each unit was added, its flags, the loss in fixed
point, the number of tokens and a sum of the samples' hashes. Everything in it is an integer, so it is exact in
either mode.

Where a group has several ranks each keeps the sums of its shards, and all of them the same ledger.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from outlast.events import HASH_BITS
from outlast.parallel import like, local
from outlast.ranks import Ranks

Wait = Callable[[], None]


class Exchange(Protocol):
    """Between all who hold a part of the sums, numbered alike by each of them."""

    rank: int
    size: int

    def add(self, tensor: Tensor) -> None:
        """Add a tensor over all of them, in place."""
        ...

    def swap(self, give: Sequence[Tensor], take: Sequence[Tensor]) -> Wait:
        """Begin to send `give[r]` to each other r, and to receive `take[r]` from it; call the result to wait.

        One's own places aren't looked at. What is given may be sent until then.
        """
        ...


RANGE_BITS = 10
"""Headroom: an element of one unit's mean gradient may be as large as 2**10 in exact mode; a larger one
flags its unit, and the update is skipped."""
LOSS_BITS = 24
"""Fixed-point bits of the loss: the sum of 4M tokens' losses is kept to 6e-8 nats."""
PIECE_BYTES = 1 << 23
"""Exchanged at a time: each piece costs its wake-ups, and a few are enough to overlap."""
IN_FLIGHT = 2
_CHUNK = {"cpu": 1 << 17}  # elements converted at a time: stays in cache
_CHUNK_ELSEWHERE = 1 << 24


class NotWholeError(Exception):
    """The sums don't hold each unit exactly once."""


@dataclass(frozen=True)
class Totals:
    """A whole step, summed.

    Attributes:
        loss: mean over the step's tokens, nats; NaN if there are bad units.
        tokens: targets that counted.
        data: hash of the samples, a sum of theirs; see `add`.
        grad: fp32 mean gradient of this rank's shards, flat, in the order of the parameters; each `p.grad` is a view
            of it.
        bad_units: units whose gradient or loss wasn't finite, or was out of range. `grad` means nothing then.
        seal: sum of everyone's seals.
        hash: of the ledger and, after an exchange, of `grad` of all; equal wherever the sums are.
    """

    loss: float
    tokens: int
    data: int
    grad: Tensor
    bad_units: tuple[int, ...]
    seal: int
    hash: str


class Sums:
    """Adds whole units, and settles a step.

    Args:
        params: trainable parameters, in a fixed order. Their gradients must be None when a unit starts.
        units: work units a step, M.
        unit_tokens: tokens of a whole unit; only its power of two matters.
        ranks: of this group.
    """

    dtype: torch.dtype

    def __init__(self, params: Sequence[Tensor], units: int, unit_tokens: int, ranks: Ranks | None = None) -> None:
        self.params = list(params)
        self.units = units
        self.ranks = ranks or Ranks()
        self.scale = 2.0 ** -math.ceil(math.log2(unit_tokens))
        """What a unit's summed loss is multiplied by before its backward: a power of two, so exact."""
        self.device = self.params[0].device
        self.piece = PIECE_BYTES // self.dtype.itemsize
        self._shapes = [local(p).shape for p in self.params]
        self.size = sum(s.numel() for s in self._shapes)
        self._flat = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self._grad = torch.zeros(self.size, dtype=torch.float32, device=self.device)
        parts = zip(self._split(self._grad), self._shapes, self.params, strict=True)
        self._views = [like(v.view(shape), p) for v, shape, p in parts]
        self._ledger = torch.zeros(2 * units + 4, dtype=torch.int64)  # added[M], flags[M], loss, tokens, data, seal
        self._empty = True

    def _split(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split([s.numel() for s in self._shapes]))

    def add(self, unit: int, loss_sum: Tensor, tokens: int, data: int = 0) -> tuple[bool, int]:
        """Take one unit's gradients, whole, out of the parameters.

        The unit is flagged if any rank's part isn't finite or is out of range: it counts as added, with nothing in
        it, and the step's update will be skipped. A function of the unit alone, so everyone would come to the same.

        Args:
            unit: its number, 0 to M-1.
            loss_sum: summed loss of this rank's tokens, nats; the backward has run on `loss_sum * scale`.
            tokens: this rank's targets that counted.
            data: sum of the hashes of this rank's samples, below 2**`HASH_BITS` each.

        Returns:
            Whether the unit isn't flagged, and the sum of its samples' hashes, modulo 2**`HASH_BITS`.
        """
        grads = [torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for p in self.params]
        loss = float(loss_sum.detach())
        loss_fixed = loss * 2.0**LOSS_BITS
        good = math.isfinite(loss) and abs(loss_fixed) <= 2**62 / (self.units * self.ranks.size)
        good = good and self._in_range(grads)
        whole = torch.tensor([int(not good), round(loss_fixed) if good else 0, tokens, data % 2**HASH_BITS])
        self.ranks.sum_(whole)
        bad, loss_fixed, tokens, data = whole.tolist()
        data %= 2**HASH_BITS
        if not bad:
            for into, grad in zip(self._split(self._flat), grads, strict=True):
                self._add(into, grad.reshape(-1), self._empty)
            self._empty = False
            self._ledger[2 * self.units] += loss_fixed
        self._ledger[unit] += 1
        self._ledger[self.units + unit] += int(bool(bad))
        self._ledger[2 * self.units + 1] += tokens
        self._ledger[2 * self.units + 2] += data
        for p in self.params:
            p.grad = None
        return not bad, data

    def clear(self) -> None:
        """Forget all units. The next `add` starts from nothing."""
        self._ledger.zero_()
        self._empty = True  # what lies in the sums is overwritten by the next unit
        for p in self.params:
            p.grad = None

    def settle(self, exchange: Exchange | None = None, seal: int = 0) -> Totals:
        """The step's totals; each `p.grad` is set. The sums stay as they are until `clear`.

        Args:
            exchange: between all who hold a part of the sums. None: all is here.
            seal: any number; the totals carry the sum of everyone's.

        Raises:
            NotWholeError: the sums of all don't hold each unit exactly once.
        """
        ledger = self._ledger.clone()
        ledger[-1] = seal
        if exchange:
            exchange.add(ledger)
        self._check(ledger[: self.units], "ledger")
        bad = tuple(ledger[self.units : 2 * self.units].nonzero().flatten().tolist())
        loss_fixed, tokens, data, total_seal = ledger[2 * self.units :].tolist()
        ledger[-1] = 0
        digest = xxhash.xxh3_128(_bytes(ledger))
        if self._empty:
            self._flat.zero_()
        if not bad:
            factor = 1.0 / (max(tokens, 1) * self.scale)
            if exchange and exchange.size > 1:
                self._settle_pieces(exchange, factor)
            else:
                self._finish(self._flat, self._grad, factor)
            if exchange:
                digest.update(_bytes(self._grad))
            for p, g in zip(self.params, self._views, strict=True):
                p.grad = g
        loss = math.nan if bad else loss_fixed / 2.0**LOSS_BITS / max(tokens, 1)
        return Totals(loss, tokens, data % 2**HASH_BITS, self._grad, bad, total_seal, digest.hexdigest())

    def _settle_pieces(self, exchange: Exchange, factor: float) -> None:
        """Piece by piece: each holder adds up its own part of it, and gives the mean of that part to all others.

        So means travel, not sums, and everyone has the same bits even where an order of adding would matter. Nothing
        is received where something is held. Each part carries the units' counts at its end, so each proves for itself
        what it is the sum of. After an error the buffers in flight are left to whoever still holds them.
        """
        me, units = exchange.rank, self.units
        counts = self._ledger[:units].to(self.device, self.dtype)
        adding: deque[tuple[list[Tensor], Wait, list[Tensor], list[Tensor]]] = deque()
        spreading: list[Wait] = []

        def land() -> None:
            take, wait, sums, means = adding.popleft()
            wait()
            total = take[me - 1]  # somebody's
            for part in take:
                if part is not total and part is not take[me]:
                    total.add_(part)
            total[:-units].add_(sums[me])
            self._check(total[-units:].add_(counts), f"part {me} of a piece")
            self._finish(total[:-units], means[me], factor)
            spreading.append(exchange.swap([means[me]] * exchange.size, means))

        for lo in range(0, self.size, self.piece):
            hi = min(lo + self.piece, self.size)
            sums, means = (list(whole[lo:hi].tensor_split(exchange.size)) for whole in (self._flat, self._grad))
            give = [torch.cat((part, counts)) if r != me else counts for r, part in enumerate(sums)]
            take = [counts.new_empty(len(sums[me]) + units) for _ in sums]
            adding.append((take, exchange.swap(give, take), sums, means))
            if len(adding) == IN_FLIGHT:
                land()
        while adding:
            land()
        for wait in spreading:
            wait()

    def _check(self, counts: Tensor, where: str) -> None:
        if not bool((counts == 1).all()):
            wrong = (counts != 1).nonzero().flatten()[:5].tolist()
            raise NotWholeError(f"{where}: units {wrong} aren't in the sum exactly once")

    def _in_range(self, grads: Sequence[Tensor]) -> bool:
        raise NotImplementedError

    def _add(self, into: Tensor, grad: Tensor, first: bool) -> None:
        """Add a gradient to its place in the sums, or put it there if it is the first."""
        raise NotImplementedError

    def _finish(self, total: Tensor, grad: Tensor, factor: float) -> None:
        """Turn sums into the mean gradient, fp32."""
        raise NotImplementedError


class ExactSums(Sums):
    """int64 fixed point. One element of one unit is `round(g * 2**bits)`, with `|g| <= 2**RANGE_BITS`.

    `bits` leaves room for M units: `2**(bits + RANGE_BITS) * M <= 2**62`. At M = 16 one step of the grid is
    2**-48 = 3.6e-15; a float32 gradient of 1e-7 is kept to its last bit.
    """

    dtype = torch.int64

    def __init__(self, params: Sequence[Tensor], units: int, unit_tokens: int, ranks: Ranks | None = None) -> None:
        super().__init__(params, units, unit_tokens, ranks)
        self.bits = 62 - math.ceil(math.log2(units)) - RANGE_BITS
        self.chunk = max(1, min(_CHUNK.get(self.device.type, _CHUNK_ELSEWHERE), self.size))
        self._float = torch.empty(self.chunk, dtype=torch.float32, device=self.device)
        self._int = torch.empty(self.chunk, dtype=torch.int64, device=self.device)
        self._double = torch.empty(self.chunk, dtype=torch.float64, device=self.device)

    def _in_range(self, grads: Sequence[Tensor]) -> bool:
        peaks = [torch.stack(g.aminmax()).float() for g in grads if g.numel()]  # NaN survives
        return not peaks or bool(torch.stack(peaks).abs().amax() <= 2.0**RANGE_BITS)

    def _add(self, into: Tensor, grad: Tensor, first: bool) -> None:
        for to, g in zip(into.split(self.chunk), grad.split(self.chunk), strict=True):
            scaled = self._float[: g.numel()]
            torch.mul(g, 2.0**self.bits, out=scaled).round_()
            if first:
                to.copy_(scaled)
            else:
                to.add_(self._int[: g.numel()].copy_(scaled))

    def _finish(self, total: Tensor, grad: Tensor, factor: float) -> None:
        for t, g in zip(total.split(self.chunk), grad.split(self.chunk), strict=True):
            wide = self._double[: t.numel()]
            g.copy_(wide.copy_(t).mul_(factor * 2.0**-self.bits))


class FloatSums(Sums):
    """fp32. A gradient that isn't finite shows in the sum, so it isn't looked for unit by unit."""

    dtype = torch.float32

    def _in_range(self, grads: Sequence[Tensor]) -> bool:
        return True

    def _add(self, into: Tensor, grad: Tensor, first: bool) -> None:
        if first:
            into.copy_(grad)
        else:
            into.add_(grad)

    def _finish(self, total: Tensor, grad: Tensor, factor: float) -> None:
        torch.mul(total, factor, out=grad)


def make_sums(kind: str, params: Sequence[Tensor], units: int, unit_tokens: int, ranks: Ranks | None = None) -> Sums:
    """`training.accumulation` -> the sums."""
    return {"exact": ExactSums, "float": FloatSums}[kind](params, units, unit_tokens, ranks)


def _bytes(t: Tensor) -> memoryview:
    return t.detach().cpu().contiguous().numpy().data.cast("B")
