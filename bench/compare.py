"""Compare outlast's step with torchtitan's and with plain processes, alternately in one run, on CPU.

    python bench/compare.py --peer-python titan-venv/bin/python [--peer ../shared/peer-bench] [--rounds 7]

Every ratio is of the median steps of two runs of the same round; given are its median over the rounds, its spread, and
the ratio of the quickest steps of all rounds, which a busy machine disturbs least. The plain trainers meet --rounds
times with each of --ranks, the fault-tolerant ones --ft-rounds times: there, 2 groups stand against 2 plain processes
at the same time on as many units. Prints one JSON line; what is going on goes to stderr.

On a machine that others use, --patience gives seconds for waiting until they take less than --others of its CPU time
(besides cores that a run leaves free), and for repeating runs in which they took more; the quietest try counts.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from step import OthersMeter, Work, run

ROOT = Path(__file__).resolve().parents[1]
BATCHES = (2, 8)
STEPS = {2: 18, 8: 8}
"""Steps of a run by batch. Long enough for a median, short enough for the whole to end in ten minutes."""
WARMUP = 3
LOOK_S = 2.0


class Bench:
    """Runs both trainers and keeps the results.

    Args:
        folder: for corpus and runs.
        peer: folder of the peer's bench.py; None: leave the peer out.
        python: the peer's.
        others: share of the machine that others may take.
        patience_s: for waiting and repeating until they do.
    """

    def __init__(self, folder: Path, peer: Path | None, python: str, others: float, patience_s: float) -> None:
        self.folder, self.peer, self.python = folder, peer, python
        self.others, self.patience_s = others, patience_s
        self.runs: dict[str, list[dict[str, Any]]] = {}

    def time(self, name: str, work: Work, peer: bool = False) -> None:
        """Take one measurement under a name. The peer's is left out where there is no peer."""
        if peer and self.peer is None:
            return
        tries, cores = [], os.cpu_count() or 1
        limit = self.others + max(0, cores - work.cores) / cores
        while True:
            self._wait_for_quiet(limit)
            began = time.monotonic()
            result = self._run_peer(work) if peer else run(work, self.folder)
            if any(result["rc"]) or "median_s" not in result:
                raise SystemExit(f"bench/compare.py: {name} failed: {json.dumps(result)}")
            print(f"{name}: {result['median_s']:.4f} s, others {result['others']:.0%}", file=sys.stderr, flush=True)
            tries.append(result)
            if result["others"] <= limit or self.patience_s <= 0:
                break
            self.patience_s -= time.monotonic() - began
        self.runs.setdefault(name, []).append(min(tries, key=lambda r: r["others"]))

    def _wait_for_quiet(self, limit: float) -> None:
        while self.patience_s > 0:
            meter = OthersMeter()
            time.sleep(LOOK_S)
            if meter.share() <= limit:
                return
            self.patience_s -= LOOK_S

    def _run_peer(self, work: Work) -> dict[str, Any]:
        assert self.peer
        out = self.folder / "peer"
        values = {"mode": work.mode, "groups": work.groups, "ranks": work.ranks, "out": out}
        values |= {k: getattr(work, k) for k in ("dim", "layers", "heads", "vocab", "seq", "batch", "steps", "warmup")}
        values |= {k: getattr(work, k) for k in ("dtype", "threads", "limit")}
        meter = OthersMeter()
        done = subprocess.run(
            [self.python, str(self.peer / "bench.py"), *(f"--{k}={v}" for k, v in values.items())],
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"bench/compare.py: {self.peer / 'bench.py'} ended with {done.returncode}")
        return json.loads(done.stdout) | {"others": meter.share()}

    def ratio(self, ours: str, theirs: str) -> dict[str, Any] | None:
        """Ours over theirs, round by round."""
        if theirs not in self.runs:
            return None
        pairs = [a["median_s"] / b["median_s"] for a, b in zip(self.runs[ours], self.runs[theirs], strict=True)]
        least = [min(r["min_s"] for r in self.runs[name]) for name in (ours, theirs)]
        return {
            "ratio": round(statistics.median(pairs), 3),
            "spread": [round(min(pairs), 3), round(max(pairs), 3)],
            "of_minima": round(least[0] / least[1], 3),
            "s": [round(statistics.median(r["median_s"] for r in self.runs[name]), 4) for name in (ours, theirs)],
        }


def find_peer(folder: Path, python: str) -> Path | None:
    """The peer's folder; None, and a word on stderr, if it can't be run."""
    for what, path in (("--peer", folder / "bench.py"), ("--peer-python", Path(python))):
        if not path.exists():
            print(f"bench/compare.py: torchtitan is left out: {what}: no {path}", file=sys.stderr)
            return None
    return folder


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, default=ROOT.parent / "shared" / "peer-bench", help="folder of bench.py")
    parser.add_argument("--peer-python", default="/tmp/titan/venv/bin/python", help="with torchtitan and torchft")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of the plain trainers")
    parser.add_argument("--ft-rounds", type=int, default=3)
    parser.add_argument("--others", type=float, default=0.05)
    parser.add_argument("--patience", type=float, default=0.0)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="outlast_compare_"))
    peer = find_peer(given.peer, given.peer_python)
    bench = Bench(folder, peer, given.peer_python, given.others, given.patience)

    for _ in range(given.rounds):
        for ranks in given.ranks:
            work = Work(steps=STEPS[2], warmup=WARMUP, ranks=ranks)
            bench.time(f"plain {ranks}", work)
            bench.time(f"titan plain {ranks}", work, peer=True)
    for _ in range(given.ft_rounds):
        for batch in BATCHES:
            work = Work(batch=batch, steps=STEPS[batch], warmup=WARMUP, processes=2)
            for kind in ("float", "exact"):
                work = dataclasses.replace(work, accumulation=kind)
                bench.time(f"2 plain {kind} {batch}", work)
                bench.time(f"ft {kind} {batch}", dataclasses.replace(work, mode="ft"))
            bench.time(f"titan ft {batch}", dataclasses.replace(work, mode="ft"), peer=True)
    shutil.rmtree(folder)

    result: dict[str, Any] = {}
    for ranks in given.ranks if given.rounds else ():
        name = f"plain / titan plain, batch 2, {ranks} rank{'s' * (ranks > 1)}"
        result[name] = bench.ratio(f"plain {ranks}", f"titan plain {ranks}")
    for batch in BATCHES if given.ft_rounds else ():
        for ours, theirs in (
            ("ft float", "2 plain float"),
            ("ft exact", "2 plain exact"),
            ("ft exact", "2 plain float"),
            ("ft float", "titan ft"),
            ("ft exact", "titan ft"),
        ):
            result[f"{ours} / {theirs}, batch {batch}"] = bench.ratio(f"{ours} {batch}", f"{theirs} {batch}")
    result |= {
        "rounds": given.rounds,
        "ft_rounds": given.ft_rounds,
        "others_most": max(r["others"] for runs in bench.runs.values() for r in runs),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
