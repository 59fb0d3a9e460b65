"""Time the steps of outlast's trainers on CPU, on the work of ../shared/peer-bench.

    python bench/step.py --mode plain --batch 2 --steps 30
    python bench/step.py --mode plain --processes 2           two that know nothing of each other, at the same time
    python bench/step.py --mode plain --ranks 2               one model, in shards on two ranks
    python bench/step.py --mode ft --groups 2 --accumulation exact

One work unit a group a step, so 2 groups do what 2 plain processes do. Prints one JSON line with the keys of the peer's
bench.py. A step's seconds are its commit's: from the commit before to its own, with data, events and the update in
between. The first --warmup are left out, and with several processes those that ran while another didn't. Only event
files are read. --out keeps the run folders.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outlast.data.corpus import prepare
from outlast.events import read_events

Event = dict[str, Any]
NUM_TOKENS = 1 << 18
STOP_S = 10.0
"""Given to processes that took too long and were asked to stop, before they are killed."""


@dataclass(frozen=True)
class Work:
    """What is run."""

    mode: Literal["plain", "ft"] = "plain"
    accumulation: Literal["float", "exact"] = "float"
    groups: int = 2
    """Of a fault-tolerant job."""
    processes: int = 1
    """Plain runs at the same time."""
    ranks: int = 1
    """Of each group or plain run; a unit is `batch` sequences of each."""
    dim: int = 256
    layers: int = 6
    heads: int = 16
    vocab: int = 2048
    seq: int = 256
    batch: int = 2
    """Sequences a work unit."""
    steps: int = 30
    warmup: int = 5
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    """CPU threads a process."""
    limit: float = 300.0
    """Seconds that all may take."""

    @property
    def copies(self) -> int:
        """Copies of the model that are trained at the same time."""
        return self.groups if self.mode == "ft" else self.processes

    @property
    def cores(self) -> int:
        """Processes that compute at the same time."""
        return self.copies * self.ranks


def ffn_dim(dim: int) -> int:
    """Hidden size of the SwiGLU: torchtitan's compute_ffn_hidden_dim(dim, multiple_of=256)."""
    return -(-int(8 * dim / 3) // 256) * 256


def make_corpus(folder: Path, vocab: int) -> None:
    """A token store of seeded random ids."""
    draw = random.Random(0)
    text, tokenizer = folder / "words.txt", folder / "tokenizer.json"
    text.write_text(" ".join(f"w{draw.randrange(vocab)}" for _ in range(NUM_TOKENS)))
    words = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(vocab)}, "unk_token": "w0"}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer.write_text(
        json.dumps(
            {"version": "1.0", **nothing, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": words}
        )
    )
    prepare([text], folder / "corpus", tokenizer)


def settings(work: Work, corpus: Path) -> list[str]:
    """Arguments of `outlast`: the peer's model, optimizer and schedule, and nothing but steps."""
    units = work.groups if work.mode == "ft" else 1
    values = {
        "model.flavor": "debug",
        "model.dim": work.dim,
        "model.n_layers": work.layers,
        "model.n_heads": work.heads,
        "model.n_kv_heads": work.heads,
        "model.ffn_dim": ffn_dim(work.dim),
        "model.vocab_size": work.vocab,
        "model.tie_embeddings": "no",
        "data.path": corpus,
        "training.steps": work.steps,
        "training.seq_len": work.seq,
        "training.local_batch_size": work.batch,
        "training.global_batch_size": work.batch * work.ranks * units,
        "training.accumulation": work.accumulation,
        "training.mixed_precision_param": work.dtype,
        "training.max_norm": 1.0,
        "training.threads": work.threads,
        "optimizer.lr": 8e-4,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.weight_decay": 0.1,
        "lr_scheduler.warmup_steps": 2,
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.min_lr_factor": 0.0,
        "checkpoint.enable": "false",
        "metrics.log_freq": 1_000_000,
        "metrics.digest_every": 0,
        "metrics.enable_tensorboard": "false",
    }
    if work.mode == "ft":
        values["fault_tolerance.min_replica_size"] = work.groups
    return [f"--{key}={value}" for key, value in values.items()]


def run(work: Work, out: Path) -> dict[str, Any]:
    """Run it in a folder, and sum up."""
    if not (out / "corpus").exists():
        make_corpus(out, work.vocab)
    runs = [out / f"{work.mode}{i}" for i in range(1 if work.mode == "ft" else work.processes)]
    command = ["-m", "outlast.cli", "train"]
    if work.mode == "ft":
        command = ["-m", "outlast.cli", "launch", f"--groups={work.groups}", f"--ranks-per-group={work.ranks}"]
    elif work.ranks > 1:
        command = ["-m", "torch.distributed.run", f"--nproc-per-node={work.ranks}", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1", "-m", "outlast.train"]
    command = [sys.executable, "-P", *command, *settings(work, out / "corpus")]
    for folder in runs:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    meter, began, t0 = OthersMeter(), time.monotonic(), time.time()
    processes = [_start([*command, f"--job.run_dir={folder}"], folder) for folder in runs]
    try:
        for p in processes:
            p.wait(max(0.0, began + work.limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"bench/step.py: not done after {work.limit:g} s, stopping", file=sys.stderr)
    finally:
        for p in processes:
            _end(p)
    wall = round(time.monotonic() - began, 1)
    return summary(work, [p.returncode for p in processes], [read_events(r) for r in runs], t0) | {
        "wall": wall,
        "others": meter.share(),
        "out": str(out),
    }


class OthersMeter:
    """Measures how busy others keep this machine. Linux only."""

    def __init__(self) -> None:
        self._began, self._since = time.monotonic(), self._read()

    def share(self) -> float:
        """Of the CPU time of all cores since the start, what went to neither this process nor its children."""
        wall = time.monotonic() - self._began
        return round(max(0.0, self._read() - self._since) / (wall * (os.cpu_count() or 1)), 3)

    @staticmethod
    def _read() -> float:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        )
        all_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        mine = os.times()
        return all_s - mine.user - mine.system - mine.children_user - mine.children_system


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # as the peer has it; training.threads counts
    with (folder / "output.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def summary(work: Work, codes: list[int], runs: list[list[Event]], t0: float) -> dict[str, Any]:
    """The result, from the events of each run. All that is timed is of group 0."""
    runs = [[e for e in events if e.get("group", 0) == 0] for events in runs]
    commits = [[e for e in events if e["kind"] == "commit"] for events in runs]
    result: dict[str, Any] = {
        "mode": work.mode,
        "accumulation": work.accumulation,
        "groups": work.groups if work.mode == "ft" else 1,
        "processes": work.processes if work.mode == "plain" else 1,
        "ranks": work.ranks,
        **{key: getattr(work, key) for key in ("dim", "layers", "seq", "batch", "vocab", "dtype")},
        "rc": codes,
        "steps": min(len(c) for c in commits),
    }
    if any(not c for c in commits):
        return result
    first, last = max(c[0]["t"] for c in commits), min(c[-1]["t"] for c in commits)
    seconds = sorted(
        e["seconds"]
        for events in commits
        for e in events
        if e["step"] > work.warmup and e["t"] - e["seconds"] >= first - 0.001 and e["t"] <= last + 0.001
    )
    if seconds:
        median = statistics.median(seconds)
        started = min(e["t"] for events in runs for e in events if e["kind"] == "start")
        result |= {
            "n": len(seconds),
            "median_s": round(median, 4),
            "p90_s": round(seconds[int(0.9 * (len(seconds) - 1))], 4),
            "min_s": round(seconds[0], 4),
            "tok_s": round(work.batch * work.seq * work.cores / median, 1),
            "startup_s": round(started - t0, 1),
            "first_step_s": round(min(c[0]["t"] for c in commits) - t0, 1),
        }
    return result


def read_work() -> tuple[Work, str]:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = {"mode": ["plain", "ft"], "accumulation": ["float", "exact"], "dtype": ["float32", "bfloat16"]}
    for field in dataclasses.fields(Work):
        parser.add_argument(
            f"--{field.name}", type=type(field.default), default=field.default, choices=choices.get(field.name)
        )
    parser.add_argument("--out", default="", help="folder for corpus and runs; default: one that is removed")
    given = vars(parser.parse_args())
    out = given.pop("out")
    return Work(**given), out


def main() -> int:
    """Run, print, and fail if the run did."""
    work, out = read_work()
    folder = Path(out).absolute() if out else Path(tempfile.mkdtemp(prefix="outlast_bench_"))
    folder.mkdir(parents=True, exist_ok=True)
    result = run(work, folder)
    print(json.dumps(result))
    failed = any(result["rc"]) or "median_s" not in result
    if failed:
        print(f"bench/step.py: the run failed; see {folder}/*/output.log", file=sys.stderr)
    elif not out:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
