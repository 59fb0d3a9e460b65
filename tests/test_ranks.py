"""Groups of several ranks: real processes, FSDP2, the same bits whichever rank is killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Launch, end_all, groups_of

PACED: dict[str, Any] = {"training__unit_pause_ms": 60, "training__steps": 60}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No process of a test outlives it."""
    yield
    end_all()


@pytest.mark.timeout(300)
def test_any_rank_may_be_killed_and_then_a_whole_group(tmp_path: Path) -> None:
    chaos = "kill rank every 2s times 3; kill g1 at step 40"
    run = Launch(tmp_path / "run", 3, chaos, ranks=2, **PACED)
    verdict = run.same_bits(training__steps=60)
    assert "lighthouse" not in {i.kind for i in verdict.incidents}
    died = [e for e in run.events("died") if e["code"]]
    assert len(died) >= 4 and all(e["code"] == -9 for e in died)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ten_ranks_are_killed_and_then_a_whole_group(tmp_path: Path) -> None:
    chaos = "kill rank every 2500ms times 10; kill g1 at step 130"
    run = Launch(tmp_path / "run", 3, chaos, ranks=2, training__unit_pause_ms=120, training__steps=150)
    run.same_bits(timeout_s=400, training__steps=150)
    assert len(run.events("chaos")) == 11
    assert len([e for e in run.events("died") if e["code"] == -9]) >= 11


@pytest.mark.full
@pytest.mark.timeout(600)
def test_all_started_at_the_same_moment_train_together_twenty_times_of_twenty(tmp_path: Path) -> None:
    for number in range(20):
        run = Launch(tmp_path / f"run{number}", 2, ranks=2, training__steps=5)
        run.same_bits(training__steps=5)
        assert not run.events("retry", "heal") and not [e for e in run.events("died") if e["code"]]
        assert groups_of(run.events("commit")[0]) == {0, 1}, "the first step is made by both"
