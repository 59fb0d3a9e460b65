"""Where this process sits in its replica group: told by torchrun, or likewise by launch. Imports no torch."""

import os
from dataclasses import dataclass

from outlast.errors import ConfigError

STORE_FD = "OUTLAST_STORE_FD"
"""A listening socket for the store of rank 0, where MASTER_PORT points: nothing can take the port from it."""
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""torchrun sets it for its ranks."""
STORE = "OUTLAST_STORE"
"""host:port of a store that whoever started the ranks keeps for them."""


@dataclass(frozen=True)
class Seat:
    """Where this process sits in its group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among the ranks on this machine: which of its devices it uses."""

    @classmethod
    def from_env(cls) -> "Seat":
        """From RANK, WORLD_SIZE and LOCAL_RANK; alone where they aren't set.

        Raises:
            ConfigError: they aren't numbers that go together.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        texts = [os.environ.get(name, default) for name, default in zip(names, ("0", "1", "0"), strict=True)]
        try:
            rank, size, local = map(int, texts)
            if not 0 <= rank < size or local < 0:
                raise ValueError
        except ValueError:
            said = ", ".join(f"{n}={t!r}" for n, t in zip(names, texts, strict=True))
            raise ConfigError(f"{said}: expected numbers with 0 <= RANK < WORLD_SIZE; torchrun sets them") from None
        return cls(rank, size, local)
