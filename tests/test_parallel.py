"""A model over the ranks of a group: the same weights and sums, all layouts together, resumed on other machines."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Launch, Process, end_all, reference, scratch

from outlast.sample import RunModel

HERE = Path(__file__).parent
LOCAL_BATCH = {1: 6, 2: 3, 3: 2}
"""Sequences of a rank, by ranks: units of six."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No process of a test outlives it."""
    yield
    end_all()


def probe(out: Path, ranks: int) -> Process:
    """`ranks_probe.py`, on so many ranks."""
    torchrun = [f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    torchrun += ["--local-addr=127.0.0.1", str(HERE / "ranks_probe.py")]
    args = [out, out.with_suffix(".run"), str(LOCAL_BATCH[ranks])]
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))}
    return Process(out.with_suffix(".out"), *torchrun, *args, env=env, module="torch.distributed.run")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Ranks of a group -> what they see."""
    folder = tmp_path_factory.mktemp("probe")
    processes = {ranks: probe(folder / f"{ranks}.json", ranks) for ranks in LOCAL_BATCH}
    for process in processes.values():
        assert process.end() == 0, process.output()[-4000:]
    return {
        ranks: json.loads((folder / f"{ranks}.json").read_text())
        | {"grads": torch.load(folder / f"{ranks}.pt", weights_only=True)}
        for ranks in LOCAL_BATCH
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_initial_weights_in_shards(ranks: int, seen: dict[int, dict[str, Any]]) -> None:
    assert not any(seen[1]["sharded"])
    assert all(seen[ranks]["sharded"])
    assert seen[ranks]["weights"] == seen[1]["weights"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_units_gradient_is_the_sum_over_its_ranks(ranks: int, seen: dict[int, dict[str, Any]]) -> None:
    ours, one = seen[ranks]["grads"], seen[1]["grads"]
    assert one.norm() > 1
    assert torch.dist(ours, one) < 1e-5 * one.norm()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputation_and_order_change_no_bit(ranks: int, dtype: str, seen: dict[int, dict[str, Any]]) -> None:
    by_mode = {k: v for k, v in seen[ranks]["trained"].items() if k.startswith(dtype)}
    assert len(by_mode) == 4
    assert len({digest for digest, _ in by_mode.values()}) == 1, by_mode


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_ranks_round_differently_and_no_more(dtype: str, seen: dict[int, dict[str, Any]]) -> None:
    squares = {ranks: facts["trained"][f"{dtype} none"][1] for ranks, facts in seen.items()}
    near = pytest.approx(squares[1], rel=1e-6 if dtype == "float32" else 1e-4)
    assert squares[2] == near and squares[3] == near
    types = {seen[2]["trained"][f"{d} none"][0] for d in ("float32", "bfloat16")}
    assert len(types) == 2, "bfloat16 makes a difference"


# Real runs -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.timeout(300)
def test_all_at_once_with_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank that comes back has to be there before the end: what is compiled once serves every process.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(scratch() / "inductor"))
    settings: dict[str, Any] = {
        "compile__enable": "true",
        "activation_checkpoint__mode": "selective",
        "training__mixed_precision_param": "bfloat16",
        "training__accumulation": "exact",
        "training__steps": 60,
    }
    reference(2, **settings)
    run = Launch(tmp_path / "run", 2, ranks=2, training__unit_pause_ms=100, **settings)
    run.wait_step(5)
    first = next(e for e in run.events("spawn") if e["group"] == 1)
    os.kill(first["pids"][1], signal.SIGKILL)
    run.wait_back(1, first["pid"])
    run.same_bits(**settings)
    assert {e["group"] for e in run.events("died") if e["code"] == -signal.SIGKILL} == {1}


@pytest.mark.timeout(300)
def test_a_run_goes_on_with_other_numbers_of_groups_and_of_ranks(tmp_path: Path) -> None:
    trajectory: dict[str, Any] = {"training__global_batch_size": 12, "training__steps": 40}
    expected = reference(2, **trajectory)

    def part(run_dir: Path, groups: int, until: int) -> None:
        """With so many groups of two, until a step."""
        run = Launch(run_dir, groups, ranks=2, training__unit_pause_ms=40, **trajectory)
        run.wait_step(until)
        os.kill(run.pid, signal.SIGTERM)
        run.end_in_order(143)

    part(tmp_path / "run", 3, 8)
    part(tmp_path / "run", 2, 16)
    shutil.copytree(tmp_path / "run", tmp_path / "single")
    single = Launch(tmp_path / "single", 4, **trajectory)
    single.end_in_order()
    four = Launch(tmp_path / "run", 4, ranks=2, **trajectory)
    four.same_bits(**trajectory)

    by_step = [{e["step"]: e for e in run.events("commit")} for run in (four, single)]
    assert by_step[0].keys() == by_step[1].keys() == set(range(1, expected.steps + 1))
    for a, b in zip(*(map(commits.get, sorted(commits)) for commits in by_step), strict=True):
        assert a and b and (a["data"], a["tokens"]) == (b["data"], b["tokens"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert RunModel(tmp_path / "run").complete("1 squared", 4), "the shards are read as one model"
    assert by_step[1][expected.steps]["units"] == 2 * by_step[0][expected.steps]["units"] == 12
