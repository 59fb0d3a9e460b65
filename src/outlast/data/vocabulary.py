"""Text to token ids and back: bytes, or a Hugging Face `tokenizers` file.

`tokenizers` is imported only where such a file is used.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from outlast.errors import DataError

END_OF_TEXT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
)
"""A tokenizers file doesn't say which token ends a text; the first of these that it has does."""


class Vocabulary(Protocol):
    """What a corpus needs of a vocabulary."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def sha256(self) -> str:
        """Hex digest: equal for vocabularies that give equal ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        ...

    @property
    def end_of_text(self) -> int | None:
        """Id put after each document."""
        ...

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, uint32 or narrower, `[tokens]`; nothing is put before or after."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens and ids outside the vocabulary give nothing."""
        ...


class Bytes:
    """Ids 0 to 255 are the bytes of UTF-8, 256 ends a text."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256
    sha256 = hashlib.sha256(b"outlast bytes 1: ids 0 to 255 are the bytes of UTF-8, 256 ends a text").hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Vocabulary.encode`."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Vocabulary.decode`; bytes that aren't UTF-8 give U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", "replace")


class HuggingFace:
    """The vocabulary of a `tokenizers` JSON.

    Args:
        content: the file's bytes.
        file: where they came from, for errors; its name becomes the vocabulary's.

    Raises:
        DataError: not such a file.
    """

    def __init__(self, content: bytes, file: Path) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as e:  # the library raises bare Exception
            why = " ".join(str(e).split())
            raise DataError(f"tokenizer {file}: not a Hugging Face tokenizers JSON ({why})") from None
        # A file may ask for texts to be cut or filled up to one length: that would lose text without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"tokenizer {file}: it has no tokens; train it first")
        self.name = file.name
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = max(ids.values()) + 1
        self.end_of_text = next((ids[name] for name in END_OF_TEXT_NAMES if name in ids), None)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Vocabulary.encode`; uses the machine's cores."""
        return [
            np.array(e.ids, np.uint32) for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Vocabulary.decode`."""
        return self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)


def read_tokenizer(file: Path) -> bytes:
    """The bytes of a tokenizer file.

    Raises:
        DataError: it can't be read.
    """
    try:
        return file.read_bytes()
    except OSError as e:
        raise DataError(f"tokenizer {file}: {e.strerror}; give the path of a Hugging Face tokenizers JSON") from None
