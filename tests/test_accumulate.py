"""Sums of work units: the same bits in any order and any grouping, and each unit exactly once or not at all."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from outlast.accumulate import LOSS_BITS, RANGE_BITS, ExactSums, FloatSums, NotWholeError, Sums, Totals, Wait
from outlast.models import token_loss

SHAPES = ((7, 5), (11,), (1,))
TOKENS = 24  # of a whole unit: not a power of two
PIECE = 13  # several pieces, none ends with a parameter
BOTH = pytest.mark.parametrize("kind", [ExactSums, FloatSums])


@dataclass(frozen=True)
class Unit:
    """One unit's gradients of `loss_sum * scale`, its loss and its targets that count."""

    grads: tuple[Tensor, ...]
    loss: float = 12.5
    tokens: int = TOKENS


def make_units(count: int, seed: int, spread: float = 6.0, peak: float = 1.0) -> list[Unit]:
    """Units whose elements lie between about `peak` and `peak / 10**spread`: float sums depend on the order."""
    g = torch.Generator().manual_seed(seed)
    units = []
    for _ in range(count):
        grads = [torch.randn(s, generator=g) * 10 ** (-spread * torch.rand(s, generator=g)) for s in SHAPES]
        grads = [(v * peak).clamp(-(2.0**RANGE_BITS), 2.0**RANGE_BITS) for v in grads]
        tokens = int(torch.randint(1, TOKENS + 1, (), generator=g))
        units.append(Unit(tuple(grads), float(torch.rand((), generator=g) * 60), tokens))
    return units


def new_sums(kind: type[Sums], units: int, piece: int = PIECE) -> Sums:
    """Empty sums over parameters of `SHAPES`, in small pieces."""
    sums = kind([nn.Parameter(torch.zeros(s)) for s in SHAPES], units, TOKENS)
    sums.piece = piece
    return sums


def add(sums: Sums, number: int, unit: Unit) -> bool:
    """Add a unit as the trainer does."""
    for p, g in zip(sums.params, unit.grads, strict=True):
        p.grad = g.clone()
    return sums.add(number, torch.tensor(unit.loss), unit.tokens)[0]


@dataclass
class Meeting:
    """Carries tensors between holders in threads: what a process group does, in one process.

    Args:
        size: holders.
        spoil: may alter the copy of a holder's tensor on its way, given (holder, call, copy). The ledger is call 0.
        fails_at: the call that fails at everyone.
    """

    size: int
    spoil: Callable[[int, int, Tensor], None] = lambda holder, call, copy: None
    fails_at: int = -1
    sent: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    """(call, from, to) -> what goes."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    left: bool = False

    def exchange_of(self, holder: int) -> "Place":
        """The exchange as one holder sees it."""
        return Place(self, holder, self.size)

    def send(self, call: int, holder: int, to: int, tensor: Tensor) -> None:
        """Put a copy on its way."""
        copy = tensor.clone()
        self.spoil(holder, call, copy)
        with self.changed:
            self.sent[call, holder, to] = copy
            self.changed.notify_all()

    def receive(self, call: int, holder: int, to: int) -> Tensor:
        """Wait for what was sent."""
        with self.changed:
            assert self.changed.wait_for(lambda: (call, holder, to) in self.sent or self.left, 30)
            if (call, holder, to) not in self.sent:
                raise ConnectionError("a peer left")
        return self.sent[call, holder, to]

    def leave(self) -> None:
        """What the trainer does after an error: the others see it too."""
        with self.changed:
            self.left = True
            self.changed.notify_all()


@dataclass
class Place:
    """One holder's."""

    meeting: Meeting
    rank: int
    size: int
    calls: int = 0

    def add(self, tensor: Tensor) -> None:
        """Over all, in place."""
        everyone = range(self.size)
        take = [torch.empty_like(tensor) for _ in everyone]
        self.begin([tensor for _ in everyone], take, everyone)()
        tensor.copy_(torch.stack(take).sum(0, dtype=tensor.dtype))

    def swap(self, give: Sequence[Tensor], take: Sequence[Tensor]) -> Wait:
        """With all others."""
        return self.begin(give, take, [r for r in range(self.size) if r != self.rank])

    def begin(self, give: Sequence[Tensor], take: Sequence[Tensor], others: Sequence[int]) -> Wait:
        """Send, and say how to receive."""
        call, self.calls = self.calls, self.calls + 1
        for r in others:
            self.meeting.send(call, self.rank, r, give[r])

        def wait() -> None:
            for r in others:
                came = self.meeting.receive(call, r, self.rank)
                assert came.shape == take[r].shape
                take[r].copy_(came)
                if call == self.meeting.fails_at:
                    take[r].fill_(77)  # what a broken connection leaves behind
                    raise ConnectionError("a peer died")

        return wait


def settle_together(holders: Sequence[Sums], meeting: Meeting | None = None, seals: Sequence[int] = ()) -> list[Any]:
    """Settle all holders at once; the totals of each, or the error that it ended with."""
    meeting = meeting or Meeting(len(holders))
    results: list[Any] = [None] * len(holders)

    def settle(i: int) -> None:
        try:
            results[i] = holders[i].settle(meeting.exchange_of(i), seals[i] if seals else 0)
        except (NotWholeError, ConnectionError) as e:
            results[i] = e
            meeting.leave()

    threads = [threading.Thread(target=settle, args=(i,)) for i in range(len(holders))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def share_out(kind: type[Sums], units: Sequence[Unit], who: Sequence[int], order: Sequence[int]) -> list[Sums]:
    """Sums of `max(who) + 1` holders, of which `who[u]` adds unit u, in an order."""
    holders = [new_sums(kind, len(units)) for _ in range(max(who) + 1)]
    for u in order:
        add(holders[who[u]], u, units[u])
    return holders


def bits(totals: Totals) -> tuple[Any, ...]:
    """Everything that must be equal."""
    return (totals.loss, totals.tokens, totals.grad.numpy().tobytes(), totals.bad_units, totals.seal, totals.hash)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, list[int], list[int]]:
    """(units, seed, holder of each unit, order of adding)."""
    units = draw(st.integers(1, 9))
    who = draw(st.lists(st.integers(0, draw(st.integers(0, 4))), min_size=units, max_size=units))
    return units, draw(st.integers(0, 2**20)), who, draw(st.permutations(range(units)))


# --- The law ---------------------------------------------------------------------------------------


@given(splits())
@settings(max_examples=60, deadline=None)
def test_exact_sums_have_the_same_bits_in_any_order_and_grouping(split: tuple[int, int, list[int], list[int]]):
    count, seed, who, order = split
    units = make_units(count, seed, spread=13.0, peak=1000.0)
    (alone,) = settle_together(share_out(ExactSums, units, [0] * count, range(count)))
    for totals in settle_together(share_out(ExactSums, units, who, order)):
        assert bits(totals) == bits(alone)


@given(splits())
@settings(max_examples=15, deadline=None)
def test_a_plain_settle_has_the_bits_of_an_exchange(split: tuple[int, int, list[int], list[int]]):
    count, seed, who, order = split
    units = make_units(count, seed)
    plain = share_out(ExactSums, units, [0] * count, range(count))[0].settle()
    shared = settle_together(share_out(ExactSums, units, who, order))[0]
    assert (plain.loss, plain.tokens) == (shared.loss, shared.tokens)
    assert torch.equal(plain.grad, shared.grad)


@given(splits())
@settings(max_examples=25, deadline=None)
def test_float_sums_agree_to_rounding_and_between_holders_to_the_bit(split: tuple[int, int, list[int], list[int]]):
    count, seed, who, order = split
    units = make_units(count, seed)
    everyone = settle_together(share_out(FloatSums, units, who, order))
    plain = share_out(FloatSums, units, [0] * count, range(count))[0].settle()
    assert len({bits(totals) for totals in everyone}) == 1
    assert (everyone[0].loss, everyone[0].tokens) == (plain.loss, plain.tokens)  # the ledger is exact all the same
    room = count * 2**-23 * torch.stack([u_flat(u).abs() for u in units]).sum(0) / (plain.tokens / 32)
    assert ((everyone[0].grad - plain.grad).abs() <= room).all()


def u_flat(unit: Unit) -> Tensor:
    """A unit's gradient, flat."""
    return torch.cat([g.reshape(-1) for g in unit.grads])


def test_float_sums_do_depend_on_the_order():
    """Else the tests of the law would prove nothing about exact sums."""
    units = make_units(8, seed=1)
    one = share_out(FloatSums, units, [0] * 8, range(8))[0].settle()
    other = share_out(FloatSums, units, [0] * 8, range(7, -1, -1))[0].settle()
    assert not torch.equal(one.grad, other.grad)


@given(st.integers(1, 12), st.integers(0, 2**20))
@settings(max_examples=25, deadline=None)
def test_exact_sums_are_the_true_mean_within_the_grid(count: int, seed: int):
    units = make_units(count, seed, spread=14.0)
    totals = share_out(ExactSums, units, [0] * count, range(count))[0].settle()
    tokens = sum(u.tokens for u in units)
    true = torch.stack([u_flat(u).double() for u in units]).sum(0) * 32 / tokens  # the scale is 1 / 32
    grid = 2.0 ** -(62 - RANGE_BITS - (count - 1).bit_length())
    error = (totals.grad.double() - true).abs()
    assert (error <= count * 0.5 * grid * 32 / tokens + 2**-23 * true.abs()).all()
    assert totals.tokens == tokens
    assert totals.loss == pytest.approx(sum(u.loss for u in units) / tokens, abs=count * 2.0**-LOSS_BITS)


def test_exact_sums_lose_nothing_on_their_grid():
    """By integers of any size: each element is rounded to the grid once, then everything is exact."""
    units = make_units(5, seed=3, spread=16.0, peak=1000.0)
    sums = new_sums(ExactSums, 5)
    assert isinstance(sums, ExactSums)
    for u, unit in enumerate(units):
        add(sums, u, unit)
    grad, tokens = sums.settle().grad.tolist(), sum(u.tokens for u in units)
    for i, found in enumerate(grad):
        total = sum(round(Fraction(float(u_flat(u)[i])) * 2**sums.bits) for u in units)
        true = float(Fraction(total, 2**sums.bits) * 32 / tokens)
        assert found == pytest.approx(true, rel=2**-23)


def test_what_is_small_survives_what_is_large_and_cancels():
    """Float sums of any width keep a number of digits; these keep a place."""
    small = make_units(1, seed=24, spread=3.0, peak=1e-7)[0]
    large = [Unit(tuple(torch.full(s, sign * 1000.0) for s in SHAPES), 1.0, 8) for sign in (1, -1)]
    units = [large[0], small, *large, large[1]]
    sums = share_out(ExactSums, units, [0] * 5, range(5))[0]
    assert isinstance(sums, ExactSums)
    grad, tokens = sums.settle().grad, sum(u.tokens for u in units)
    on_grid = (u_flat(small).double() * 2**sums.bits).round() / 2**sums.bits
    assert torch.allclose(grad.double(), on_grid * 32 / tokens, rtol=2**-23, atol=0)


@BOTH
def test_each_gradient_is_a_view_of_the_flat_one(kind: type[Sums]):
    unit = make_units(1, seed=0)[0]
    sums = new_sums(kind, 1)
    add(sums, 0, unit)
    assert all(p.grad is None for p in sums.params)
    totals = sums.settle()
    assert [p.grad.shape for p in sums.params if p.grad is not None] == [torch.Size(s) for s in SHAPES]
    totals.grad.zero_()
    assert all(p.grad is not None and not p.grad.any() for p in sums.params)


@BOTH
def test_a_parameter_that_a_unit_did_not_use_adds_nothing(kind: type[Sums]):
    units = make_units(2, seed=4)
    sums = new_sums(kind, 2)
    add(sums, 0, units[0])
    sums.params[1].grad = torch.ones(SHAPES[1])
    sums.add(1, torch.tensor(1.0), 8)
    zero = Unit((torch.zeros(SHAPES[0]), torch.ones(SHAPES[1]), torch.zeros(SHAPES[2])), 1.0, 8)
    expected = share_out(kind, [units[0], zero], [0, 0], range(2))[0].settle()
    assert torch.equal(sums.settle().grad, expected.grad)


# --- Units that can't be added ---------------------------------------------------------------------

BAD = {
    "inf": float("inf"),
    "minus inf": float("-inf"),
    "nan": float("nan"),
    "large": 2.0**RANGE_BITS * 1.001,
    "minus large": -(2.0**RANGE_BITS) * 1.001,
}


def spoilt(unit: Unit, value: float, place: int) -> Unit:
    """A unit with one element of its gradient replaced."""
    grads = [g.clone() for g in unit.grads]
    part = grads[place % len(grads)]
    part.view(-1)[place % part.numel()] = value
    return Unit(tuple(grads), unit.loss, unit.tokens)


@given(splits(), st.data())
@settings(max_examples=40, deadline=None)
def test_bad_units_are_found_one_by_one_whoever_holds_them(
    split: tuple[int, int, list[int], list[int]], data: st.DataObject
):
    """Two opposite infinities, or two values past the range, would cancel in a sum."""
    count, seed, who, order = split
    units = make_units(count, seed)
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    for u in bad:
        units[u] = spoilt(units[u], BAD[data.draw(st.sampled_from(sorted(BAD)))], data.draw(st.integers(0, 40)))
    everyone = settle_together(share_out(ExactSums, units, who, order))
    assert {t.bad_units for t in everyone} == {tuple(sorted(bad))}
    assert len({(t.loss, t.tokens, t.hash) for t in everyone}) == 1


@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
def test_a_bad_unit_puts_nothing_into_the_sums(value: float):
    good, other = make_units(2, seed=5)
    sums = new_sums(ExactSums, 2)
    assert add(sums, 0, good)
    before = sums._flat.clone()
    assert not add(sums, 1, spoilt(other, value, 3))
    assert torch.equal(sums._flat, before)
    assert all(p.grad is None for p in sums.params)
    totals = sums.settle()
    assert totals.bad_units == (1,)
    assert all(p.grad is None for p in sums.params)  # nothing for an optimizer to take


@BOTH
@pytest.mark.parametrize("loss", [float("inf"), float("nan"), 1e18])
def test_a_bad_loss_is_a_bad_unit(kind: type[Sums], loss: float):
    unit = make_units(1, seed=6)[0]
    sums = new_sums(kind, 1)
    assert not add(sums, 0, Unit(unit.grads, loss))
    assert sums.settle().bad_units == (0,)


def test_the_largest_values_of_all_units_fit():
    """The stated headroom: every element of every unit at the range's end, of either sign."""
    for count in (1, 3, 16, 100):
        for sign in (1, -1):
            unit = Unit(tuple(torch.full(s, sign * 2.0**RANGE_BITS) for s in SHAPES), 1.0, 32)
            sums = new_sums(ExactSums, count)
            for u in range(count):
                assert add(sums, u, unit)
            assert (sums.settle().grad == sign * 2.0**RANGE_BITS).all()


def test_an_infinite_gradient_shows_in_float_sums():
    units = make_units(2, seed=7)
    sums = share_out(FloatSums, [spoilt(units[0], float("inf"), 0), units[1]], [0, 0], range(2))[0]
    assert not torch.isfinite(sums.settle().grad).all()


# --- Each unit exactly once ------------------------------------------------------------------------


@BOTH
def test_a_unit_counted_twice_or_never_is_refused_by_all(kind: type[Sums]):
    units = make_units(4, seed=8)
    for held in ([{0, 1, 2}, {2, 3}], [{0, 1}, {3}], [{0, 1, 2, 3}, {0, 1, 2, 3}], [set(), set()]):
        holders = [new_sums(kind, 4) for _ in held]
        for sums, mine in zip(holders, held, strict=True):
            for u in mine:
                add(sums, u, units[u])
        assert [type(e) for e in settle_together(holders)] == [NotWholeError] * 2


@BOTH
def test_a_unit_added_twice_by_one_holder_is_refused(kind: type[Sums]):
    unit = make_units(1, seed=9)[0]
    sums = new_sums(kind, 1)
    add(sums, 0, unit)
    add(sums, 0, unit)
    with pytest.raises(NotWholeError):
        sums.settle()


@BOTH
@pytest.mark.parametrize("call", [0, 1, 2, 4, 6])
def test_every_piece_proves_its_own_units(kind: type[Sums], call: int):
    """A member's old tensor in the place of a single piece: the ledger alone would not see it."""
    units = make_units(4, seed=10)
    holders = share_out(kind, units, [0, 0, 1, 1], range(4))
    assert -(-holders[0].size // PIECE) == 4

    def stale(holder: int, at: int, copy: Tensor) -> None:
        if holder == 1 and at == call:
            copy.zero_()

    errors = settle_together(holders, Meeting(2, stale))
    assert isinstance(errors[0], NotWholeError)
    assert ("ledger" in str(errors[0])) == (call == 0)
    assert isinstance(errors[1], NotWholeError if call == 0 else ConnectionError), "and nobody has the step"


@BOTH
@pytest.mark.parametrize("call", [3, 5, 7, 8])
def test_means_that_change_on_their_way_are_seen_in_the_hash(kind: type[Sums], call: int):
    holders = share_out(kind, make_units(4, seed=10), [0, 0, 1, 1], range(4))

    def stale(holder: int, at: int, copy: Tensor) -> None:
        if holder == 1 and at == call:
            copy.zero_()

    ours, theirs = settle_together(holders, Meeting(2, stale))
    assert ours.hash != theirs.hash


# --- Attempts that fail ----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("call", range(9))
def test_an_exchange_that_fails_midway_leaves_the_sums_as_they_were(kind: type[Sums], call: int):
    """A peer's death leaves foreign sums in the buffers; what is held must not be among them."""
    units = make_units(6, seed=11)
    who = [0, 1, 2, 0, 1, 2]
    expected = settle_together(share_out(kind, units, who, range(6)))
    holders = share_out(kind, units, who, range(6))
    before = [h._flat.clone() for h in holders]
    errors = settle_together(holders, Meeting(3, fails_at=call))
    assert all(isinstance(e, ConnectionError) for e in errors)
    assert all(torch.equal(h._flat, b) for h, b in zip(holders, before, strict=True))
    # Only the dead holder's units are computed again, by the others.
    add(holders[0], 2, units[2])
    add(holders[1], 5, units[5])
    again = settle_together(holders[:2])
    assert len({bits(t) for t in again}) == 1
    if kind is ExactSums:
        assert bits(again[0]) == bits(expected[0])
    else:
        assert torch.allclose(again[0].grad, expected[0].grad)


@BOTH
def test_an_exchange_can_be_done_again(kind: type[Sums]):
    """Buffers are reused from the second on."""
    holders = share_out(kind, make_units(5, seed=12), [0, 1, 0, 1, 1], range(5))
    first = [bits(t) for t in settle_together(holders)]
    assert [bits(t) for t in settle_together(holders)] == first
    assert [bits(t) for t in settle_together(holders)] == first


@BOTH
def test_a_spare_holder_adds_nothing_though_its_buffer_is_stale(kind: type[Sums]):
    """`clear` is cheap: it leaves the old numbers where they are."""
    old, new = make_units(3, seed=13), make_units(3, seed=14)
    expected = settle_together(share_out(kind, new, [0, 0, 0], range(3)))[0]
    spare = new_sums(kind, 3)
    for u in range(3):
        add(spare, u, old[u])
    spare.settle()
    spare.clear()
    busy = share_out(kind, new, [0, 0, 0], range(3))[0]
    assert [bits(t) for t in settle_together([spare, busy])] == [bits(expected)] * 2


@BOTH
def test_a_cleared_holder_starts_from_nothing(kind: type[Sums]):
    old, new = make_units(3, seed=15), make_units(3, seed=16)
    sums = share_out(kind, old, [0] * 3, range(3))[0]
    sums.clear()
    for u in range(3):
        add(sums, u, new[u])
    expected = share_out(kind, new, [0] * 3, range(3))
    assert bits(settle_together([sums])[0]) == bits(settle_together(expected)[0])


@BOTH
def test_a_flagged_first_unit_does_not_leave_the_old_sums_in(kind: type[Sums]):
    """The first good unit after `clear` overwrites, also if a bad one came before it."""
    old, new = make_units(2, seed=17), make_units(2, seed=18)
    bad = Unit(new[0].grads, float("nan"), new[0].tokens)
    used, fresh = share_out(kind, old, [0] * 2, range(2))[0], new_sums(kind, 2)
    used.clear()
    for sums in (used, fresh):
        assert not add(sums, 0, bad)
        assert add(sums, 1, new[1])
    assert torch.equal(used._flat, fresh._flat)


@BOTH
def test_seals_are_added_and_are_no_part_of_the_hash(kind: type[Sums]):
    """A seal names an attempt; another attempt at the same step must have the same hash."""
    holders = share_out(kind, make_units(4, seed=19), [0, 1, 2, 0], range(4))
    one = settle_together(holders, seals=[5, 7, 2**40])
    two = settle_together(holders, seals=[1, 1, 1])
    assert {t.seal for t in one} == {12 + 2**40}
    assert {t.seal for t in two} == {3}
    assert len({t.hash for t in [*one, *two]}) == 1


@given(st.integers(0, 4), st.integers(0, 46), st.sampled_from([-1, 1]))
@settings(max_examples=30, deadline=None)
def test_the_hash_tells_updates_apart_and_nothing_else(unit: int, place: int, by: int):
    units = make_units(5, seed=20)
    holders = share_out(ExactSums, units, [0, 0, 1, 1, 1], range(5))
    before = settle_together(holders)[0]
    grad = before.grad.clone()
    holders[0 if unit < 2 else 1]._flat[place] += by
    after = settle_together(holders)[0]
    assert (after.hash == before.hash) == torch.equal(after.grad, grad)


def test_the_size_of_the_pieces_changes_no_bit():
    """It follows the device; groups on unlike devices must still agree."""
    units = make_units(4, seed=21)
    found = set()
    for piece in (1, 5, PIECE, 46, 47, 48, 1 << 18):
        holders = [new_sums(ExactSums, 4, piece) for _ in range(2)]
        for u, unit in enumerate(units):
            add(holders[u % 2], u, unit)
        found |= {bits(t) for t in settle_together(holders)}
    assert len(found) == 1


# --- The token mean (case C6) ----------------------------------------------------------------------


def c6_units() -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of two units, with 1 and 9 targets that count."""
    g = torch.Generator().manual_seed(22)
    out = []
    for valid in (1, 9):
        targets = torch.randint(0, 13, (2, 12), generator=g)
        targets.view(-1)[valid:] = -100
        out.append((torch.randn(2, 12, 8, generator=g), targets))
    return out


def c6_run(kind: type[Sums], who: Sequence[int]) -> tuple[list[Totals], nn.Linear]:
    """Sum both units over holders that share a model."""
    torch.manual_seed(23)
    model = nn.Linear(8, 13)
    holders = [kind(list(model.parameters()), 2, 24) for _ in range(max(who) + 1)]
    for u, (x, targets) in enumerate(c6_units()):
        loss, tokens = token_loss(model(x), targets)
        (loss * holders[who[u]].scale).backward()
        holders[who[u]].add(u, loss, tokens)
    return settle_together(holders), model


@BOTH
def test_units_of_1_and_9_tokens_give_the_token_mean(kind: type[Sums]):
    (alone,), model = c6_run(kind, [0, 0])
    everyone, _ = c6_run(kind, [0, 1])
    assert alone.tokens == 10
    if kind is ExactSums:
        assert [bits(t) for t in everyone] == [bits(alone)] * 2
    x = torch.cat([x for x, _ in c6_units()])
    targets = torch.cat([t for _, t in c6_units()])
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), targets.flatten(), ignore_index=-100)
    true = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
    for totals in [alone, *everyone]:
        assert torch.allclose(totals.grad, true, rtol=1e-5, atol=1e-8)
        assert totals.loss == pytest.approx(loss.item(), rel=1e-6)


def test_a_step_without_any_target_that_counts_changes_nothing():
    sums = new_sums(ExactSums, 1)
    zeros = Unit(tuple(torch.zeros(s) for s in SHAPES), 0.0, 0)
    assert add(sums, 0, zeros)
    totals = sums.settle()
    assert (totals.loss, totals.tokens, totals.bad_units) == (0.0, 0, ())
    assert not totals.grad.any()
