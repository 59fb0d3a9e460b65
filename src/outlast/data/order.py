"""The global order of samples: sample index to tokens, a pure function without state.

`grain` shuffles windows of the token store; the position of a run in its data *is* its step.
"""

import contextlib
import logging
from collections.abc import Iterator

import numpy as np
import xxhash
from absl import logging as absl_logging

from outlast.data.corpus import Corpus
from outlast.errors import DataError
from outlast.events import HASH_BITS


@contextlib.contextmanager
def _without_jax_warning() -> Iterator[None]:
    """grain warns at import that its profiler needs jax, which nothing here uses; other warnings pass."""

    def is_other(record: logging.LogRecord) -> bool:
        return "jax profiler" not in record.getMessage()

    logger = absl_logging.get_absl_logger()
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


with _without_jax_warning():
    import grain

MAX_WINDOWS = 1 << 32
"""grain shuffles 32-bit indices, and repeats windows without a word beyond."""


class Samples:
    """The endless sequence of training samples.

    The corpus is cut into windows of `seq_len` tokens, each read with the token after it. An epoch is every
    window once; each epoch has its own order, drawn from the seed. `samples[i]` depends on (corpus, seq_len,
    seed, i) only: any process gets the same, in any order of asking. Tokens after the last whole window are
    never read.

    Args:
        corpus: an open corpus.
        seq_len: tokens that are predicted in a sample.
        seed: of the order, 0 or more.

    Raises:
        DataError: the corpus has no whole window, or more than grain can shuffle.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int) -> None:
        windows = _Windows(corpus.tokens, seq_len)
        if not len(windows):
            raise DataError(
                f"corpus {corpus.path}: {corpus.num_tokens:,} tokens are less than one sample of "
                f"training.seq_len + 1 = {seq_len + 1:,}; prepare more text or lower training.seq_len"
            )
        if len(windows) > MAX_WINDOWS:
            raise DataError(
                f"corpus {corpus.path}: {len(windows):,} samples of training.seq_len = {seq_len} tokens are more than "
                f"{MAX_WINDOWS:,}, the most that can be shuffled; raise training.seq_len"
            )
        # grain's order of epoch e is that of seed + e: neighbouring seeds would give the same orders, one epoch apart.
        spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._windows = grain.MapDataset.source(windows).shuffle(seed=spread).repeat(reseed_each_epoch=True)
        self.epoch_len = len(windows)
        self.seq_len = seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index` (0 or more) of the global order, `[seq_len + 1]` int64."""
        if index < 0:
            raise IndexError(f"sample {index}: the first is 0")
        sample = self._windows[index]
        assert sample is not None  # grain's type also covers pipelines that filter
        return sample


class _Windows:
    """Random access to the windows of a token store, in order of place."""

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._seq_len)

    def __getitem__(self, index: int) -> np.ndarray:
        first = index * self._seq_len
        return np.array(self._tokens[first : first + self._seq_len + 1], np.int64)


def unit_batch(samples: Samples, first: int, count: int) -> np.ndarray:
    """Samples `first` to `first + count - 1` of the global order, `[count, seq_len + 1]` int64."""
    return np.stack([samples[i] for i in range(first, first + count)])


def hash_of_samples(batch: np.ndarray, first: int) -> int:
    """A number that stands for these samples: the sum, over them, of a 48-bit hash of a sample's number and bytes.

    Sums of parts are the sum of the whole, so it doesn't matter who reads which part.

    Args:
        batch: samples by their first dimension.
        first: number of the first in the global order.
    """
    hashes = (xxhash.xxh3_64_intdigest(sample.tobytes(), seed=first + i) for i, sample in enumerate(batch))
    return sum(h % 2**HASH_BITS for h in hashes) % 2**HASH_BITS


def seed_of(samples: range, seed: int) -> int:
    """Of what is random while these samples are trained on, in a run with this seed."""
    return xxhash.xxh3_64_intdigest(samples.start.to_bytes(8, "little"), seed=seed)


def unit_samples(step: int, unit: int, *, units: int, unit_size: int) -> range:
    """Indices in the global order that a work unit reads.

    Args:
        step: 1 for the first update.
        unit: of the step, from 0.
        units: units a step.
        unit_size: samples a unit.
    """
    assert step >= 1 and 0 <= unit < units, (step, unit, units)
    first = ((step - 1) * units + unit) * unit_size
    return range(first, first + unit_size)
