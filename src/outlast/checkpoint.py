"""Saved weights: named tensors of a training state, its digest, and whole saves on disk.

The state is one flat mapping, `model.NAME` and `optimizer.NAME.KEY` to tensors, whatever reads it: the
digest, a save, a peer. Where the model is sharded, each rank digests, saves and hands on its own shards.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from outlast import saves
from outlast.errors import DataError, StorageError
from outlast.parallel import local
from outlast.ranks import Ranks


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Every tensor that training changes, sorted by name. Tied parameters appear once."""
    out: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        out[f"model.{name}"] = p.detach()
        if optimizer is not None:
            out |= {f"optimizer.{name}.{key}": v for key, v in optimizer.state.get(p, {}).items()}
    persistent = model.state_dict().keys()
    out |= {f"model.{name}": b.detach() for name, b in model.named_buffers() if name in persistent}
    return dict(sorted(out.items()))


def digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bits of this rank's part of a state, hex."""
    h = hashlib.sha256()
    for name, t in sorted(state.items()):
        h.update(f"{name} {t.dtype} {tuple(local(t).shape)}\n".encode())
        h.update(tensor_bytes(t))
    return h.hexdigest()


def digest_of_ranks(digests: Sequence[str]) -> str:
    """The digest of a whole group: its only rank's, or SHA-256 over all ranks' in their order, hex."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def slice_digest(state: Mapping[str, Tensor], step: int) -> str:
    """Hash of the 1 MiB slice of this rank's part of a state whose turn it is at a step, hex.

    The slice moves on with each step, so that two states that differ anywhere are told apart once it gets there.
    """
    h = xxhash.xxh3_128()
    total = sum(local(t).nbytes for t in state.values())
    lo, at = step % -(-total // _SLICE) * _SLICE, 0
    for _, t in sorted(state.items()):
        size = local(t).nbytes
        if at < lo + _SLICE and at + size > lo:
            h.update(tensor_bytes(t)[max(0, lo - at) : lo + _SLICE - at])
        at += size
    return h.hexdigest()


_SLICE = 1 << 20


def tensor_bytes(t: Tensor) -> memoryview:
    """The bits of this rank's part of a tensor, flat, without a copy where it lies on the CPU."""
    flat = local(t.detach()).cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Saved:
    """A whole save."""

    run_dir: Path
    step: int
    meta: dict[str, Any]

    @classmethod
    def read(cls, run_dir: str | Path, step: int) -> "Saved":
        """A save that is known to be whole."""
        return cls(Path(run_dir), step, json.loads((saves.save_path(run_dir, step) / "state.json").read_text()))

    @property
    def path(self) -> Path:
        """Its folder."""
        return saves.save_path(self.run_dir, self.step)

    def tensors(self, model_only: bool = False) -> dict[str, Tensor]:
        """Its whole state, in memory."""
        with self._parts(model_only) as parts:
            whole = {name: [part[...] for part in where] for name, where in parts.items()}
            return {name: torch.cat(t) if len(t) > 1 else t[0] for name, t in whole.items()}

    def load_into(self, state: Mapping[str, Tensor], model_only: bool = False) -> None:
        """Copy its values into a state in place, each rank its own part, however many ranks wrote it.

        Raises:
            DataError: a name, shape or dtype differs; nothing was changed.
        """
        with self._parts(model_only) as parts:
            layouts = {name: _layout(where) for name, where in parts.items()}
            _check_layout({n: (tuple(t.shape), _DTYPES[t.dtype]) for n, t in state.items()}, layouts, str(self.path))
            with torch.no_grad():
                for name, t in state.items():
                    local(t).copy_(_rows(parts[name], *_my_rows(t)))

    @contextlib.contextmanager
    def _parts(self, model_only: bool) -> Iterator[dict[str, list[Any]]]:
        """Each tensor's shards, in order of the ranks that wrote them, as slices that read when they are indexed."""
        with contextlib.ExitStack() as files:
            out: dict[str, list[Any]] = {}
            for part in ("model",) if model_only else ("model", "optimizer"):
                for path in sorted(self.path.glob(f"{part}*.safetensors")):
                    file = files.enter_context(safe_open(path, "pt"))
                    for name in file.keys():  # noqa: SIM118
                        out.setdefault(name, []).append(file.get_slice(name))
            yield out

    def load_model(self, model: nn.Module) -> None:
        """Put its weights into a model.

        Raises:
            DataError: it is of another model.
        """
        self.load_into(named_state(model), model_only=True)


_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
_DTYPES |= {torch.bool: "BOOL"}
Layout = tuple[tuple[int, ...], str]


def _layout(shards: Sequence[Any]) -> Layout:
    """Whole shape and dtype of a tensor that is in shards along its first dimension."""
    shape = shards[0].get_shape()
    rows = [sum(s.get_shape()[0] for s in shards)] if shape else []
    return (*rows, *shape[1:]), shards[0].get_dtype()


def _rows(shards: Sequence[Any], lo: int, hi: int) -> Tensor:
    """Rows of a tensor that is in shards along its first dimension; one without dimensions is whole."""
    if not shards[0].get_shape():
        return shards[0][...]
    out, at = [], 0
    for shard in shards:
        size = shard.get_shape()[0]
        out.append(shard[max(0, lo - at) : max(0, min(size, hi - at))])
        at += size
    return torch.cat(out)


def _my_rows(t: Tensor) -> tuple[int, int]:
    """The rows of a tensor that this rank has: equal shares, rounded up, as FSDP2 cuts them."""
    if not isinstance(t, DTensor):
        return 0, t.shape[0] if t.dim() else 0
    share = -(-t.shape[0] // t.device_mesh.size())
    lo = min(t.device_mesh.get_local_rank() * share, t.shape[0])
    return lo, lo + local(t).shape[0]


def _check_layout(mine: Mapping[str, Layout], theirs: Mapping[str, Layout], where: str) -> None:
    """Raises DataError where names, shapes or dtypes differ."""
    if mine.keys() != theirs.keys():
        odd = sorted(mine.keys() ^ theirs.keys())[0]
        raise DataError(
            f"{where}: {odd} is {'missing' if odd in mine else 'not in this model'}; use the run's own config"
        )
    for name, (shape, dtype) in mine.items():
        if theirs[name] != (shape, dtype):
            raise DataError(f"{where}: {name} is {theirs[name][1]} {theirs[name][0]}; this model has {dtype} {shape}")


def install(into: Mapping[str, Tensor], source: Mapping[str, Tensor], where: str) -> None:
    """Copy a peer's state into this rank's, in place; all names and shapes are looked at first.

    Args:
        into: this rank's state.
        source: the parts that the same rank of a peer has.
        where: they come from, for the message.

    Raises:
        DataError: a name, shape or dtype differs; nothing was changed.
    """
    mine, theirs = ({n: (tuple(local(t).shape), _DTYPES[t.dtype]) for n, t in s.items()} for s in (into, source))
    _check_layout(mine, theirs, where)
    with torch.no_grad():
        for name, t in into.items():
            local(t).copy_(source[name])


def save(
    run_dir: str | Path,
    step: int,
    state: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: int,
    ranks: Ranks | None = None,
) -> int:
    """Write a whole save, then remove older ones. All ranks of a group call it, each writes its shards.

    Args:
        run_dir: folder of the run, the same for all of them.
        step: updates committed.
        state: as from `named_state`.
        meta: small JSON facts kept with it.
        keep: newest saves to keep, 0 for all.
        ranks: of this group; left out: one.

    Returns:
        Bytes written.

    Raises:
        StorageError: it can't be written; what was there before is untouched.
    """
    ranks = ranks or Ranks()
    final = saves.save_path(run_dir, step)
    files: dict[str, dict[str, Any]] = {}
    why = ""
    with contextlib.ExitStack() as undo:  # leaving it removes what isn't whole
        try:
            folder = undo.enter_context(saves.temporary_folder(final)) if ranks.rank == 0 else None
        except OSError as e:
            folder, why = None, _reason(e)
        name = ranks.first(str(folder) if folder else "")
        if name:
            try:
                files = _write_shards(Path(name), state, ranks)
            except (OSError, SafetensorError) as e:
                why = _reason(e)
        why = ranks.error(why)
        files = {file: facts for theirs in ranks.all(files) for file, facts in theirs.items()}
        if not why and ranks.rank == 0:
            try:
                _finish_save(Path(name), final, step, meta, files)
                saves.prune(run_dir, keep, step)
            except OSError as e:
                why = _reason(e)
        why = ranks.first(why)
    if why:
        raise StorageError(f"weights can't be saved to {final}: {why}; free space or choose a folder")
    return sum(f["bytes"] for f in files.values())


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _write_shards(folder: Path, state: Mapping[str, Tensor], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Write this rank's files; what every rank has whole, rank 0 writes."""
    suffix = f"-{ranks.rank + 1:05d}-of-{ranks.size:05d}" if ranks.size > 1 else ""
    out = {}
    for part in ("model", "optimizer"):
        path = folder / f"{part}{suffix}.safetensors"
        mine = {k: v for k, v in state.items() if k.startswith(part + ".")}
        mine = {k: v for k, v in mine.items() if ranks.rank == 0 or isinstance(v, DTensor)}
        save_file({k: local(v.detach()).cpu().contiguous() for k, v in mine.items()}, path)
        saves.sync(path)
        out[path.name] = saves.file_facts(path)
    return out


def _finish_save(folder: Path, final: Path, step: int, meta: Mapping[str, Any], files: dict[str, Any]) -> None:
    (folder / "state.json").write_text(json.dumps(dict(meta), indent=1, sort_keys=True) + "\n")
    files["state.json"] = saves.file_facts(folder / "state.json")
    manifest = {"format": saves.FORMAT, "step": step, "files": dict(sorted(files.items()))}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    saves.make_final(folder, final)


def newest(run_dir: str | Path) -> Saved | None:
    """The newest save whose every byte is as it was written, or None."""
    step = saves.newest_step(run_dir)
    return None if step is None else Saved.read(run_dir, step)
