"""Saved weights: named tensors of a training state, its digest, and whole saves on disk.

The state is one flat mapping, `model.NAME` and `optimizer.NAME.KEY` to tensors, whatever reads it: the
digest, a save, a peer.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outlast import saves
from outlast.errors import DataError, StorageError


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
    """SHA-256 over names, dtypes, shapes and bits of a state, hex."""
    h = hashlib.sha256()
    for name, t in sorted(state.items()):
        h.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        h.update(tensor_bytes(t))
    return h.hexdigest()


def slice_digest(state: Mapping[str, Tensor], step: int) -> str:
    """Hash of the 1 MiB slice of a state whose turn it is at a step, hex.

    The slice moves on with each step, so that two states that differ anywhere are told apart once it gets there.
    """
    h = xxhash.xxh3_128()
    total = sum(t.numel() * t.element_size() for t in state.values())
    lo, at = step % -(-total // _SLICE) * _SLICE, 0
    for _, t in sorted(state.items()):
        size = t.numel() * t.element_size()
        if at < lo + _SLICE and at + size > lo:
            h.update(tensor_bytes(t)[max(0, lo - at) : lo + _SLICE - at])
        at += size
    return h.hexdigest()


_SLICE = 1 << 20


def tensor_bytes(t: Tensor) -> memoryview:
    """The bits of a tensor, flat, without a copy where it lies on the CPU."""
    flat = t.detach().cpu().contiguous().reshape(-1)
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
        """Its state, in memory."""
        out = load_file(self.path / "model.safetensors")
        return out if model_only else out | load_file(self.path / "optimizer.safetensors")

    def load_model(self, model: nn.Module) -> None:
        """Put its weights into a model.

        Raises:
            DataError: it is of another model.
        """
        install(named_state(model), self.tensors(model_only=True), str(self.path))


def install(into: Mapping[str, Tensor], source: Mapping[str, Tensor], where: str) -> None:
    """Copy a whole state into another, in place; all names and shapes are looked at first.

    Raises:
        DataError: a name, shape or dtype differs; nothing was changed.
    """
    if into.keys() != source.keys():
        odd = sorted(into.keys() ^ source.keys())[0]
        raise DataError(
            f"{where}: {odd} is {'missing' if odd in into else 'not in this model'}; use the run's own config"
        )
    for name, t in into.items():
        s = source[name]
        if (t.shape, t.dtype) != (s.shape, s.dtype):
            raise DataError(f"{where}: {name} is {s.dtype} {tuple(s.shape)}; this model has {t.dtype} {tuple(t.shape)}")
    with torch.no_grad():
        for name, t in into.items():
            t.copy_(source[name])


def save(run_dir: str | Path, step: int, state: Mapping[str, Tensor], meta: Mapping[str, Any], keep: int) -> int:
    """Write a whole save, then remove older ones.

    Args:
        run_dir: folder of the run.
        step: updates committed.
        state: as from `named_state`.
        meta: small JSON facts kept with it.
        keep: newest saves to keep, 0 for all.

    Returns:
        Bytes written.

    Raises:
        StorageError: it can't be written; what was there before is untouched.
    """
    final = saves.save_path(run_dir, step)
    try:
        with saves.whole_folder(final) as folder:
            for part in ("model", "optimizer"):
                tensors = {k: v.detach().cpu().contiguous() for k, v in state.items() if k.startswith(part + ".")}
                save_file(tensors, folder / f"{part}.safetensors")
            (folder / "state.json").write_text(json.dumps(dict(meta), indent=1, sort_keys=True) + "\n")
            files = {
                p.name: {"bytes": p.stat().st_size, "sha256": saves.file_sha256(p)} for p in sorted(folder.iterdir())
            }
            manifest = {"format": saves.FORMAT, "step": step, "files": files}
            (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        saves.prune(run_dir, keep, step)
    except (OSError, SafetensorError) as e:
        why = getattr(e, "strerror", None) or e
        raise StorageError(f"weights can't be saved to {final}: {why}; free space or choose a folder") from e
    return sum(f["bytes"] for f in files.values())


def newest(run_dir: str | Path) -> Saved | None:
    """The newest save whose every byte is as it was written, or None."""
    step = saves.newest_step(run_dir)
    return None if step is None else Saved.read(run_dir, step)
