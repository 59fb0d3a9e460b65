"""Groups of several ranks: real processes, FSDP2, the same bits whichever rank is killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Launch, end_all

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
    run.same_bits(training__steps=60)
    died = [e for e in run.events("died") if e["code"]]
    assert len(died) >= 4 and all(e["code"] == -9 for e in died)
