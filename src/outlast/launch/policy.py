"""What to do when a process ends: pure decisions, each with its reason in words.

Values in, values out: no clock, no process, no file. Imports no torch.
"""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outlast.errors import EXIT_FAILED, EXIT_OK, EXIT_REFUSED, EXIT_STOPPED

MAX_FRUITLESS = 6
"""Deaths in a row without anything achieved after which a process is given up."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STEADY_S = 0.5
"""A lighthouse that lived this long was sound: it listens after 0.05 s, or ends at once."""

Outcome = Literal["restart", "finished", "refused", "stopped", "given up"]


@dataclass(frozen=True)
class Verdict:
    """What becomes of a process that ended."""

    outcome: Outcome
    reason: str
    restart_in_s: float | None = None
    """Seconds until it is started again; None: never."""
    fruitless: int = 0
    """Its deaths in a row so far without anything achieved."""


@dataclass(frozen=True)
class End:
    """The whole launch ends."""

    code: int
    reason: str


def describe(code: int) -> str:
    """An exit code in words; negative: the signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


OTHERS_S = 2.0
"""Given to the other ranks of a group in which one ended with an error, to say what they know of it."""


def grace_of_the_others_s(code: int) -> float | None:
    """Seconds until the other ranks of its group are killed when one rank's process ends; None: they end by
    themselves.

    Args:
        code: its exit code; negative: the signal that killed it.
    """
    if code < 0:
        return 0.0
    return None if code in (EXIT_OK, EXIT_STOPPED) else OTHERS_S


def first_failure(ends: Sequence[tuple[int, int, str]]) -> tuple[int, int, str]:
    """What a group ended of, of its ranks' ends (rank, exit code, what else is known) in the order that they came.

    A refusal goes before all, then a signal: who lost a rank only knows that it is gone, and may be heard of first.
    """
    refused = [e for e in ends if e[1] == EXIT_REFUSED]
    signalled = [e for e in ends if e[1] < 0]
    failed = [e for e in ends if grace_of_the_others_s(e[1]) is not None]
    return (refused or signalled or failed or list(ends))[0]


def after_exit(code: int, *, fruitless: int, achieved: bool, chaos: bool = False) -> Verdict:
    """What becomes of a group whose process ended.

    Args:
        code: its exit code; negative: the signal that killed it.
        fruitless: deaths in a row before this one in lives that achieved nothing.
        achieved: whether this life committed anything.
        chaos: we killed it ourselves, so its death says nothing about it.
    """
    if code == EXIT_OK:
        return Verdict("finished", "finished")
    if code == EXIT_REFUSED:
        return Verdict("refused", "refused (exit code 2): starting it again won't help; its log says why")
    if code == EXIT_STOPPED:
        return Verdict("stopped", "stopped as asked")
    what = describe(code) + (" by chaos" if chaos else "")
    if chaos or achieved:
        return Verdict("restart", what, 0.0, fruitless if chaos and not achieved else 0)
    fruitless += 1
    if fruitless >= MAX_FRUITLESS:
        return Verdict(
            "given up", f"{what}; given up after {fruitless} deaths in a row without a commit", None, fruitless
        )
    wait_s = backoff_s(fruitless)
    if wait_s:
        what += f"; death {fruitless} in a row without a commit (given up at {MAX_FRUITLESS})"
    return Verdict("restart", what, wait_s, fruitless)


def backoff_s(fruitless: int) -> float:
    """Seconds to wait: none after the first fruitless death, then 0.5 and doubling, at most 30."""
    return 0.0 if fruitless <= 1 else min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (fruitless - 2))


def after_lighthouse(code: int, *, lived_s: float, fruitless: int, chaos: bool = False) -> Verdict:
    """What becomes of a lighthouse that ended: back at once on the same port, unless it can't live at all."""
    if code in (EXIT_OK, EXIT_REFUSED, EXIT_STOPPED):
        code = EXIT_FAILED  # it never ends on its own: an exit code means it couldn't go on
    return after_exit(code, fruitless=fruitless, achieved=lived_s >= STEADY_S, chaos=chaos)


def end_of_run(outcomes: Iterable[Outcome]) -> End | None:
    """How the launch ends, once no group runs or will run again; None while one does."""
    seen = set(outcomes)
    if "restart" in seen:
        return None
    if "finished" in seen:
        return End(EXIT_OK, "finished")
    if "given up" in seen:
        return End(EXIT_FAILED, "no group is left: given up, the logs say why")
    if "stopped" in seen:
        return End(EXIT_STOPPED, "all groups were stopped")
    return End(EXIT_REFUSED, "all groups were refused; their logs say why")


def weights_left(committed: int, newest_save: int | None, done: dict[str, Any] | None, run_dir: str) -> End | None:
    """Whether a run in which no living group holds the weights can go on.

    Args:
        committed: the highest step committed; 0: none.
        newest_save: step of the newest whole save, or None.
        done: the marker of a run that made its last step, or None.
        run_dir: folder of the run, for the message.

    Returns:
        None if it can, else the refusal that names what is lost.
    """
    if committed == 0 or newest_save is not None or done is not None:
        return None
    steps = f"steps 1-{committed} were" if committed > 1 else "step 1 was"
    return End(
        EXIT_REFUSED,
        f"{steps} committed and nobody holds the weights any more: no group that had them is alive and "
        f"{run_dir}/checkpoints has no whole save. Start over in another --run-dir, with checkpoint.enable and a "
        "checkpoint.interval that you can afford to lose",
    )
