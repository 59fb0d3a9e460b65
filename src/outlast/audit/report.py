"""`outlast audit RUN [OTHER_RUN] [--json]`: reads, asks for the verdict, prints it."""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outlast.audit.verdict import Audit, Comparison, audit, compare
from outlast.errors import EXIT_FAILED, EXIT_OK, DataError, StorageError, UserError
from outlast.events import read_events

SHOWN = 20
"""Differences that are shown; the count is of all."""


def audit_command(args: list[str]) -> int:
    """Check one run, or whether two are one trajectory.

    Returns:
        0 if every promise was kept (and the two are one trajectory), 1 if not, 2 if there is nothing to check.
    """
    parser = argparse.ArgumentParser("outlast audit", description="Check what a run promised, from its events alone.")
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    parser.add_argument("other", metavar="OTHER_RUN", nargs="?", help="also: are the two one trajectory, bit for bit?")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    try:
        options = parser.parse_args(args)
    except SystemExit as end:  # argparse has said why
        return int(end.code or 0)
    try:
        audits = [_audit_run(run) for run in (options.run, options.other) if run is not None]
    except UserError as e:
        print(f"outlast: {e}", file=sys.stderr)
        return e.exit_code
    both = compare(*audits) if len(audits) == 2 else None
    if options.json:
        print(json.dumps(_answer(audits, both), indent=2, allow_nan=False))
    else:
        _show(audits, [options.run, options.other], both)
    kept = not any(a.broken for a in audits) and (both is None or both.same)
    return EXIT_OK if kept else EXIT_FAILED


def _audit_run(run: str) -> Audit:
    """Read and check a run.

    Raises:
        UserError: there is nothing to check.
    """
    folder = Path(run)
    if not folder.is_dir():
        raise DataError(f"{run}: no such folder; give the run folder that `train` or `launch` printed")
    try:
        events = read_events(folder)
    except OSError as e:
        raise StorageError(f"{e.filename}: {e.strerror}; the events must be readable") from None
    except TypeError:
        raise DataError(f"{folder / 'events'}: the time `t` of some event isn't a number") from None
    if not events:
        raise DataError(f"{folder / 'events'}: no events there; is {run} the folder of a run?")
    return audit(events)


# --- JSON ------------------------------------------------------------------------------------------


def to_json(a: Audit) -> dict[str, Any]:
    """A verdict as JSON takes it: without the history, and numbers that aren't finite as null."""
    out = _plain(dataclasses.asdict(dataclasses.replace(a, trajectory={}, history=(), digests={})))
    for left_out in ("trajectory", "history", "digests"):
        del out[left_out]
    return out | {"broken": list(a.broken[:SHOWN]), "broken_count": len(a.broken)}


def _answer(audits: list[Audit], both: Comparison | None) -> dict[str, Any]:
    if both is None:
        return to_json(audits[0])
    return _plain(dataclasses.asdict(both)) | {"runs": [to_json(a) for a in audits]}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- For a person ----------------------------------------------------------------------------------


def incident_table(a: Audit) -> Table:
    """What disturbed a run, and what each time cost. Times in seconds."""
    table = Table(title="incidents", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("step", justify="right")
    table.add_column("what")
    for name in ("detect s", "re-form s", "gap s", "heal s", "redone units"):
        table.add_column(name, justify="right")
    for i in a.incidents:
        whom = "" if i.group is None else f" g{i.group}"
        times = ["" if s is None else f"{s:.2f}" for s in (i.detect_s, i.reform_s, i.gap_s, i.heal_s)]
        table.add_row(str(i.step), i.kind + whom, *times, "" if i.redone_units is None else str(i.redone_units))
    return table


def _show(audits: list[Audit], names: list[str], both: Comparison | None) -> None:
    # A table cut to 80 columns in a log is of no use to anyone; a terminal knows its width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for a, name in zip(audits, names, strict=False):
        console.print(_summary(a, name))
        if a.incidents:
            console.print()
            console.print(incident_table(a))
        for note in a.notes[:SHOWN]:
            console.print(f"note: {escape(note)}", soft_wrap=True)
        _show_broken(console, a)
    if both is not None:
        console.print(escape(_judgement(both)), style="bold" if both.same else "bold red", soft_wrap=True)


def _show_broken(console: Console, a: Audit) -> None:
    for text in a.broken[:SHOWN]:
        console.print(f"[bold red]broken:[/] {escape(text)}", soft_wrap=True)
    if len(a.broken) > SHOWN:
        console.print(f"… and {len(a.broken) - SHOWN} more")
    console.print()


def _summary(a: Audit, name: str) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    verdict = f"[bold red]{len(a.broken)} promises broken[/]" if a.broken else "[bold green]every promise kept[/]"
    rows = [
        ("run", escape(name)),
        ("verdict", verdict),
        ("steps committed", f"{a.committed_steps} of {a.steps}{'' if a.finished else ' (not finished)'}"),
        ("each unit once", _yes(a.units_exactly_once)),
        ("each sample once", _yes(a.samples_exactly_once)),
        ("digests equal", _yes(a.digests_equal)),
        ("final digest", a.final_digest or "none logged"),
        ("final loss", "none" if a.final_loss is None else repr(a.final_loss)),
        ("groups, lives", f"{a.groups}, {a.lives}"),
        ("goodput", "none" if a.goodput is None else f"{a.goodput:.3f}"),
        ("units redone", str(a.redone_units)),
        ("committed twice", _steps(a.twice_committed)),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _steps(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:SHOWN])) + (" …" if len(steps) > SHOWN else "")
    return f"{len(steps)} steps: {shown}" if steps else "none"


def _yes(value: bool) -> str:
    return "yes" if value else "[bold red]no[/]"


def _judgement(both: Comparison) -> str:
    d = both.difference
    if d is not None:
        where = f"step {d.step}, " if d.step else ""
        return f"not one trajectory: {where}{d.field} is {d.a!r} in the first and {d.b!r} in the second"
    if not both.same:
        return "not shown to be one trajectory: no step was committed in both"
    return (
        f"one trajectory: {both.common_steps} steps and {both.common_digests} digests in common, the same bits in both"
    )
