"""Promises of the data package: a corpus is whole and true or refused; the order is a pure function."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.config import Data
from outlast.data import corpus as corpora
from outlast.data import sources, store
from outlast.data.corpus import Corpus, open_corpus, prepare, prepare_command
from outlast.data.order import Samples, unit_batch, unit_samples
from outlast.data.vocabulary import Bytes
from outlast.errors import ConfigError, DataError, StorageError, UserError

END = Bytes.end_of_text


def make_store(folder: Path, tokens: np.ndarray, vocab_size: int, block_bytes: int = store.BLOCK_BYTES) -> Path:
    """A store of given ids: each window can then be told from every other."""
    folder.mkdir()
    dtype = store.dtype_for(vocab_size)
    with store.TokenWriter(folder, dtype, block_bytes) as writer:
        writer.write(tokens)
        blocks = writer.finish()
    m = store.Manifest(
        1, [], "bytes", Bytes.sha256, vocab_size, -1, dtype, len(tokens), 1, 1, 0, block_bytes, blocks, ""
    )
    store.write_manifest(folder, dataclasses.replace(m, hash=m.content_hash()))
    return folder


def counting(num_tokens: int) -> Corpus:
    """A corpus whose token i is i."""
    with tempfile.TemporaryDirectory() as folder:
        return Corpus(make_store(Path(folder) / "c", np.arange(num_tokens), max(num_tokens, 1)))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of text with all that a real one has."""
    folder = tmp_path / "text"
    (folder / "b" / ".git").mkdir(parents=True)
    (folder / "a.txt").write_text("first\n")
    (folder / "z.md").write_bytes("läst\r\n".encode())
    (folder / "b" / "c.py").write_text("inner = 1\n")
    (folder / "b" / "photo.png").write_bytes(b"\x89PNG\r\n\0\xff")
    (folder / "b" / "old.txt").write_bytes("é".encode("latin-1"))
    (folder / "b" / ".git" / "HEAD").write_text("hidden")
    (folder / "b" / "empty.txt").write_text("")
    return folder


@pytest.fixture
def made(text: Path, tmp_path: Path) -> Path:
    """A corpus of it."""
    prepare([text], tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Hugging Face tokenizers file, byte-level BPE."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    t.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    t.enable_truncation(4)  # some published files have this; it must lose no text
    file = tmp_path_factory.mktemp("tokenizer") / "small.json"
    t.save(str(file))
    return file


def python(code: str, *args: object, **env: str) -> subprocess.Popen[str]:
    """Start a fresh Python process."""
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env, start_new_session=True
    )


def refused(action: Callable[[], object], kind: type[UserError] = DataError) -> str:
    """The one line that an action is refused with."""
    with pytest.raises(kind) as e:
        action()
    line = str(e.value)
    assert "\n" not in line
    return line


# --- Order -----------------------------------------------------------------------------------------


@given(windows=st.integers(1, 300), seq_len=st.integers(1, 9), spare=st.integers(0, 8), seed=st.integers(0, 2**40))
@settings(max_examples=25, deadline=None)
def test_each_epoch_reads_every_window_once(windows: int, seq_len: int, spare: int, seed: int):
    samples = Samples(counting(windows * seq_len + 1 + spare % seq_len), seq_len, seed)
    assert samples.epoch_len == windows
    for epoch in range(2):
        read = [samples[epoch * windows + i] for i in range(windows)]
        assert all(s.dtype == np.int64 and (s == s[0] + np.arange(seq_len + 1)).all() for s in read)
        assert sorted(int(s[0]) for s in read) == [w * seq_len for w in range(windows)]


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    n = 50
    c = counting(n * 4 + 1)
    orders = {
        (seed, epoch): tuple(int(Samples(c, 4, seed)[epoch * n + i][0]) for i in range(n))
        for seed in (0, 1, 2)
        for epoch in (0, 1, 2, 1000)
    }
    assert len(set(orders.values())) == len(orders)


def test_the_order_is_the_one_that_older_runs_were_trained_in():
    """If this changes (with another grain, say), a resumed run reads samples twice and misses others."""
    samples = Samples(counting(10_001), 10, seed=7)
    read = [int(samples[i][0]) // 10 for i in (0, 1, 2, 999, 1000, 10**12)]
    assert read == [661, 759, 214, 867, 727, 733]


def test_the_order_is_the_same_in_another_process(made: Path):
    code = """if True:
        import sys; from pathlib import Path
        from outlast.data.corpus import Corpus; from outlast.data.order import Samples
        s = Samples(Corpus(Path(sys.argv[1])), 3, 5)
        print([s[i].tolist() for i in (40, 0, 3, 3, 1)])"""
    other, err = python(code, made).communicate(timeout=30)
    samples = Samples(Corpus(made), 3, 5)
    here = {i: samples[i].tolist() for i in (0, 1, 3, 40)}
    assert json.loads(other) == [here[i] for i in (40, 0, 3, 3, 1)]
    assert err == ""  # grain's remark about jax


def test_only_the_remark_about_jax_is_silenced():
    code = "import outlast.data.order; from absl import logging; logging.warning('a jax profiler'); print(end='')"
    assert "a jax profiler" in python(code).communicate(timeout=30)[1]


@given(units=st.integers(1, 20), unit_size=st.integers(1, 5), step=st.integers(1, 1000))
def test_units_of_successive_steps_read_on_without_gap_or_overlap(units: int, unit_size: int, step: int):
    read = [
        i
        for s in (step, step + 1)
        for unit in range(units)
        for i in unit_samples(s, unit, units=units, unit_size=unit_size)
    ]
    batch = units * unit_size
    assert read == list(range((step - 1) * batch, (step + 1) * batch))


def test_a_unit_is_its_samples_in_order():
    samples = Samples(counting(101), 5, 0)
    batch = unit_batch(samples, 18, 4)  # across the end of an epoch
    assert batch.shape == (4, 6)
    assert batch.dtype == np.int64
    assert batch.tolist() == [samples[i].tolist() for i in range(18, 22)]


def test_a_corpus_of_less_than_a_window_is_refused():
    line = refused(lambda: Samples(counting(8), 8, 0))
    assert "8 tokens" in line
    assert "= 9" in line
    with pytest.raises(IndexError):
        Samples(counting(9), 8, 0)[-1]


# --- What a corpus holds ---------------------------------------------------------------------------


def test_documents_of_a_folder_are_joined_in_sorted_order(made: Path):
    c = Corpus(made)
    documents = [b"first\n", "läst\r\n".encode(), b"inner = 1\n"]
    assert c.tokens.tolist() == [i for d in documents for i in [*d, END]]
    assert c.tokens.dtype == np.uint16
    assert (c.vocab_size, c.num_tokens) == (257, sum(map(len, documents)) + 3)
    m = c.manifest
    assert (m.num_documents, m.num_bytes, m.num_skipped) == (3, sum(map(len, documents)), 2)
    with pytest.raises(ValueError):
        c.tokens[0] = 1


def test_json_lines(tmp_path: Path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a\\nb", "id": 1}\n\n{"text": ""}\n{"text": "é"}\n')
    prepare([file], tmp_path / "c")
    assert Corpus(tmp_path / "c").tokens.tolist() == [*b"a\nb", END, *"é".encode(), END]


def test_a_long_document_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "PIECE_CHARS", 10)
    monkeypatch.setattr(corpora, "PIECE_CHARS", 10)
    content = "".join(f"line {i} é\r\n" for i in range(40)) + "x" * 35
    (tmp_path / "long.txt").write_bytes(content.encode())
    prepare([tmp_path / "long.txt"], tmp_path / "c")
    assert Corpus(tmp_path / "c").tokens.tolist() == [*content.encode(), END]


def test_the_hash_is_of_the_content_not_of_the_place(made: Path, text: Path, tmp_path: Path):
    shutil.copytree(text, tmp_path / "elsewhere")
    prepare([tmp_path / "elsewhere"], tmp_path / "second")
    assert Corpus(tmp_path / "second").hash == Corpus(made).hash
    (text / "a.txt").write_text("First\n")
    prepare([text], tmp_path / "third")
    assert Corpus(tmp_path / "third").hash != Corpus(made).hash


@given(st.text())
def test_bytes_round_trip(s: str):
    c = Bytes()
    ids = c.encode([s])[0].tolist()
    assert c.decode(ids) == s
    assert c.decode([*ids, END, 300, -1]) == s  # a model's padded vocabulary can give those


def test_hugging_face_round_trip(tokenizer: Path, text: Path, tmp_path: Path):
    prepare([text], tmp_path / "c", tokenizer)
    c = open_corpus(Data(path=str(tmp_path / "c"), tokenizer=str(tokenizer)))
    s = "the quick brown fox, läst over the lazy dog\n"
    assert c.decode(c.encode(s)) == s
    assert len(c.encode(s)) < len(s)
    assert c.tokens.tolist() == [i for d in ("first\n", "läst\r\n", "inner = 1\n") for i in [*c.encode(d), 0]]
    assert c.decode([*c.encode(s), 0, 10_000]) == s
    assert c.vocab_size <= 300
    assert c.tokenizer_hash != Bytes.sha256


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path: Path):
    ids = np.array([0, 70_000, 131_071])
    c = Corpus(make_store(tmp_path / "c", ids, 131_072))
    assert (c.tokens.dtype, c.tokens.tolist()) == (np.uint32, ids.tolist())


def test_the_command_says_what_it_made(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert prepare_command(["--out", str(tmp_path / "c"), str(text)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    for word in ("26 tokens", "3 documents", "23 bytes", str(tmp_path / "c"), "2 files passed over"):
        assert word in out
    assert "--out" in refused(lambda: prepare_command([str(text)]), ConfigError)


# --- What is refused -------------------------------------------------------------------------------


def edit(made: Path, **values: object) -> None:
    file = made / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def cut(made: Path) -> None:
    os.truncate(made / "tokens.bin", 50)


def drop_key(made: Path) -> None:
    values = json.loads((made / "manifest.json").read_text())
    del values["num_tokens"], values["blocks"]
    (made / "manifest.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, ["no such folder", "outlast prepare"]),
        (lambda made: (made / "manifest.json").unlink(), ["no manifest.json"]),
        (lambda made: (made / "manifest.json").write_text('{"form'), ["manifest.json isn't valid JSON"]),
        (lambda made: (made / "manifest.json").write_text("[]"), ["manifest.json lacks", "num_tokens"]),
        (drop_key, ["manifest.json lacks num_tokens, blocks"]),
        (lambda made: edit(made, format_version=2), ["format version 2", "reads version 1"]),
        (lambda made: edit(made, vocab_size=300), ["manifest.json was altered"]),
        (lambda made: edit(made, blocks="x"), ["wrong type for blocks"]),
        (lambda made: (made / "tokens.bin").unlink(), ["tokens.bin can't be read", "No such file"]),
        (cut, ["tokens.bin has 50 bytes, expected 52"]),
        (lambda made: flip(made / "tokens.bin", 7), ["tokens.bin was altered", "bytes 0 to 51"]),
    ],
)
def test_a_corpus_that_is_not_whole_is_refused(made: Path, damage: Callable[[Path], object], words: list[str]):
    damage(made)
    line = refused(lambda: open_corpus(Data(path=str(made))))
    for word in [str(made), *words]:
        assert word in line


def test_an_empty_corpus_is_refused(tmp_path: Path):
    line = refused(lambda: Corpus(make_store(tmp_path / "c", np.arange(0), 257)))
    assert "empty" in line


@given(at=st.integers(0, 199))
@settings(max_examples=30, deadline=None)
def test_a_flipped_byte_is_found_and_its_block_named(at: int):
    with tempfile.TemporaryDirectory() as folder:
        made = make_store(Path(folder) / "c", np.arange(100), 257, block_bytes=16)
        flip(made / "tokens.bin", at)
        line = refused(lambda: Corpus(made))
        assert f"bytes {at // 16 * 16} to {min(at // 16 * 16 + 15, 199)} " in line


def test_of_a_very_large_store_blocks_from_end_to_end_are_checked(tmp_path: Path):
    made = make_store(tmp_path / "c", np.arange(80), 257, block_bytes=16)  # 10 blocks
    m = store.read_manifest(made)
    found = []
    for block in range(10):
        flip(made / "tokens.bin", block * 16)
        try:
            store.open_tokens(made, m, most_blocks=4)
        except DataError:
            found.append(block)
        flip(made / "tokens.bin", block * 16)
    assert found == [0, 3, 6, 9]


def test_another_tokenizer_than_the_corpus_was_made_with_is_refused(made: Path, tokenizer: Path, tmp_path: Path):
    line = refused(lambda: open_corpus(Data(path=str(made), tokenizer=str(tokenizer))))
    assert "tokenizer bytes" in line
    assert str(tokenizer) in line
    line = refused(lambda: open_corpus(Data(path=str(made), tokenizer=str(tmp_path / "none.json"))))
    assert "none.json: No such file" in line


def test_an_altered_tokenizer_in_a_corpus_is_refused(text: Path, tokenizer: Path, tmp_path: Path):
    prepare([text], tmp_path / "c", tokenizer)
    with (tmp_path / "c" / "tokenizer.json").open("a") as f:
        f.write(" ")
    assert "tokenizer.json was altered" in refused(lambda: Corpus(tmp_path / "c"))
    (tmp_path / "c" / "tokenizer.json").unlink()
    assert "tokenizer.json: No such file" in refused(lambda: Corpus(tmp_path / "c"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"body": "x"}', ["found an object with body"]),
        ('{"text": 5}', ['"text" field']),
        ('"text"', ["found no object"]),
        ("{text", ["not JSON"]),
        ('{"text": "\\ud800"}', ["surrogate"]),
    ],
)
def test_a_json_line_without_text_is_refused(tmp_path: Path, line: str, words: list[str]):
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a"}\n' + line + "\n")
    said = refused(lambda: prepare([file], tmp_path / "c"))
    for word in [f"{file}, line 2", *words]:
        assert word in said
    assert os.listdir(tmp_path) == ["x.jsonl"]


def test_sources_that_give_no_text_are_refused(tmp_path: Path):
    (tmp_path / "photo.png").write_bytes(b"\0\xff")
    out = tmp_path / "c"
    assert f"{tmp_path / 'nothing'}: no such file" in refused(lambda: prepare([tmp_path / "nothing"], out))
    assert "photo.png: not UTF-8 text" in refused(lambda: prepare([tmp_path / "photo.png"], out))
    assert "1 files aren't UTF-8 text" in refused(lambda: prepare([tmp_path], out))
    bad = refused(lambda: prepare([tmp_path], out, tmp_path / "photo.png"))
    assert "photo.png: not a Hugging Face tokenizers JSON" in bad
    assert not out.exists()


def test_nothing_is_overwritten(made: Path, text: Path, tokenizer: Path):
    before = (made / "tokens.bin").stat().st_mtime_ns
    prepare([text], made)  # the same: kept
    assert (made / "tokens.bin").stat().st_mtime_ns == before
    assert "another corpus is there already" in refused(lambda: prepare([text / "a.txt"], made))
    assert "another corpus is there already" in refused(lambda: prepare([text], made, tokenizer))
    (text / "a.txt").write_text("changed\n")
    assert "another corpus is there already" in refused(lambda: prepare([text], made))
    assert "isn't a corpus" in refused(lambda: prepare([text / "a.txt"], text))
    assert "is a file" in refused(lambda: prepare([text], text / "a.txt"))
    assert sorted(p.name for p in made.parent.iterdir()) == ["made", "text"]


def test_a_place_that_cannot_be_written_is_refused(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = text / "a.txt" / "c"
    assert f"can't be written to {out}: Not a directory" in refused(lambda: prepare([text], out))
    monkeypatch.setenv("OUTLAST_CACHE", str(text / "a.txt"))
    line = refused(lambda: open_corpus(Data()))
    assert "Not a directory" in line
    assert "OUTLAST_CACHE" in line

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in refused(lambda: prepare([text], tmp_path / "c"), StorageError)
    assert os.listdir(tmp_path) == ["text"]


# --- The default corpus, several processes, death --------------------------------------------------

DEFAULT = "from outlast.data.corpus import *; from outlast.config import Data; print(open_corpus(Data()).hash)"


def test_the_default_corpus_is_made_once_by_processes_that_start_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    both = [python(DEFAULT, OUTLAST_CACHE=str(tmp_path)) for _ in range(2)]
    said = [p.communicate(timeout=60) for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert len(os.listdir(tmp_path)) == 1  # no leftovers

    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path))
    c = open_corpus(Data())
    assert c.hash == said[0][0].strip()
    assert capsys.readouterr().err == ""  # found, not made again
    content = c.tokens[c.tokens < END].astype(np.uint8).tobytes()
    assert b"def check_output(" in content  # of subprocess.py
    assert b"class AbstractMemoryTests" not in content  # of test/test_memoryview.py

    flip(c.path / "tokens.bin", 12345)  # a damaged cache mends itself
    assert open_corpus(Data()).hash == c.hash
    assert "tokens.bin was altered" in capsys.readouterr().err
    assert len(os.listdir(tmp_path)) == 1


def test_death_in_the_middle_leaves_no_half_store(text: Path, tmp_path: Path):
    code = """if True:
        import os, sys, time
        from outlast.data.corpus import prepare
        def stop(fd):
            print("tokens are written, nothing is named yet", flush=True)
            time.sleep(60)
        os.fsync = stop
        prepare([sys.argv[1]], sys.argv[2])"""
    out = tmp_path / "c"
    process = python(code, text, out)
    assert process.stdout is not None
    assert process.stdout.readline()
    prepare([text], tmp_path / "c2")  # beside one that is at work: both names are safe
    left = [p for p in tmp_path.iterdir() if p.name.startswith(".c.")]
    assert len(left) == 1
    with store.new_folder(out):  # another that starts leaves it alone
        assert left[0].exists()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert not out.exists()
    prepare([text], out)
    assert Corpus(out).hash == Corpus(tmp_path / "c2").hash
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "c2", "text"]
