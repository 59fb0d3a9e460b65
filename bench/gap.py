"""What the death of a group costs the others: the gap between two commits of a survivor.

    python bench/gap.py [--groups 3] [--kills 12] [--units 12] [--pause-ms 50] [--seed 0] [--folder DIR]

Trains a tiny model whose work units are paced by a sleep, so that the figures are those of the protocol and not of
this machine, and SIGKILLs a group drawn at random again and again, at any moment of a step. Prints one JSON line:

    median, p90      gap_s over the kills, from `outlast audit`
    bound            heartbeat timeout + the units that a survivor computes when the dead group's are shared out anew
    step             median time of an undisturbed step
    unit             median time of a unit
    detect           median time until a survivor shows that it misses the group
    n, kills         kills with survivors that had committed and went on; all kills
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outlast.audit import audit
from outlast.data.corpus import prepare
from outlast.events import read_events

HEARTBEAT_S = 0.5
PERIOD_S = 2.3
"""Between kills: time to come back, heal and make some steps. No multiple of a step."""


def main(args: Sequence[str]) -> int:
    """Run, and print the line."""
    parser = argparse.ArgumentParser("bench/gap.py", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--units", type=int, default=12, help="work units a step")
    parser.add_argument("--pause-ms", type=float, default=50.0, help="sleep added to each unit")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--folder", type=Path, help="for corpus and run, kept; left out: a temporary one")
    asked = parser.parse_args(args)
    if asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
        return measure(asked, asked.folder)
    with tempfile.TemporaryDirectory(prefix="outlast-gap-") as folder:
        return measure(asked, Path(folder))


def measure(asked: argparse.Namespace, folder: Path) -> int:
    """One launch with its kills."""
    (folder / "text.txt").write_text(" ".join(str(n * n) for n in range(5000)))
    prepare([folder / "text.txt"], folder / "corpus")
    share = math.ceil(asked.units / asked.groups)
    step_s = share * (asked.pause_ms / 1000 + 0.005)
    steps = math.ceil((asked.kills + 1) * PERIOD_S / step_s)
    run_dir = folder / "run"
    settings = {
        "data.path": folder / "corpus",
        "model.flavor": "demo",
        "model.dim": 32,
        "model.n_layers": 2,
        "model.n_heads": 2,
        "model.n_kv_heads": 1,
        "model.ffn_dim": 64,
        "training.seq_len": 16,
        "training.steps": steps,
        "training.local_batch_size": 1,
        "training.global_batch_size": asked.units,
        "training.threads": 1,
        "training.unit_pause_ms": asked.pause_ms,
        "fault_tolerance.heartbeat_timeout_ms": round(1000 * HEARTBEAT_S),
        "metrics.digest_every": 0,
        "metrics.enable_tensorboard": "false",
        "groups": asked.groups,
        "run_dir": run_dir,
        "chaos": f"kill every {PERIOD_S}s times {asked.kills}",
        "chaos_seed": asked.seed,
    }
    command = [sys.executable, "-m", "outlast.cli", "launch", *(f"--{k}={v}" for k, v in settings.items())]
    with (folder / "launch.out").open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=out, timeout=30 * steps * step_s + 120).returncode
    events = read_events(run_dir)
    verdict = audit(events)
    if code or not verdict.finished or verdict.broken:
        print((folder / "launch.out").read_text(), *verdict.broken, sep="\n", file=sys.stderr)
        return 1
    kills = [i for i in verdict.incidents if i.kind == "kill"]
    gaps = sorted(i.gap_s for i in kills if i.gap_s is not None and i.step > 1)
    unit_s = statistics.median(e["seconds"] for e in events if e["kind"] == "unit")
    figures = {
        "bench": "gap",
        "median": statistics.median(gaps),
        "p90": gaps[math.ceil(0.9 * len(gaps)) - 1],
        "bound": HEARTBEAT_S + math.ceil(asked.units / (asked.groups - 1)) * unit_s,
        "step": statistics.median(e["seconds"] for e in events if e["kind"] == "commit"),
        "unit": unit_s,
        "detect": statistics.median(i.detect_s for i in kills if i.detect_s is not None),
        "n": len(gaps),
        "kills": len(kills),
        "groups": asked.groups,
        "units": asked.units,
        "pause_ms": asked.pause_ms,
    }
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
