"""Tensors that are made only when they are written, so that a large file needs little memory.

Files are mapped, not read: a tensor costs memory only where it is computed, and at most one shard
of those exists at a time.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from animegamer.atomic import write_text
from animegamer.checkpoint import CheckpointError
from animegamer.models.decoder_files import PEFT_PREFIX

SHARD_BYTES = 5_000_000_000
# Under which names training programs keep the weights in their files.
CONTAINERS = ("module", "state_dict", "model")
# Plain data that training programs put beside the weights; none of it can run code.
_RECONSTRUCT: Any = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
_BESIDE = [
    (SimpleNamespace, "argparse.Namespace"),
    np.ndarray,
    np.dtype,
    type(np.dtype("uint32")),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor by shape and type; ``make`` gives its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor] = field(repr=False)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LazyTensor:
        """A tensor that is there already, perhaps mapped from a file."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size on disk."""
        return self.numel * int(self.dtype.itemsize)


Tensors = Mapping[str, LazyTensor]


@dataclass(frozen=True)
class TorchFile:
    """Weights in a file of ``torch.save``.

    Attributes:
        path: the file.
        container: key under which the weights lie, or None where they are the whole file.
        tensors: the weights by name, mapped.
        beside: numbers and words that lie beside the weights, such as ``iteration``.
        ignored: names of what else lies beside them, such as an optimizer's state.
    """

    path: Path
    container: str | None
    tensors: dict[str, LazyTensor]
    beside: dict[str, Any]
    ignored: tuple[str, ...]


def read_torch(path: str | Path) -> TorchFile:
    """Maps a file of ``torch.save`` without running anything that it may hold.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if it is damaged, holds no weights, or more than plain data.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        with torch.serialization.safe_globals(_BESIDE):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"\.\s+(.*)", str(error))
        what = found[1] if found else "code"
        raise CheckpointError(
            f"{path}: refused, it holds {what}, which could run code; expected plain tensors. If "
            "you trust its origin, save the bare state dict again with torch.save"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:160]
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes): not a whole file of torch.save ({reason}); "
            "expected its zip format: it is damaged, cut short or only a pointer to the real file; "
            "download it again"
        ) from None
    return _weights(path, content)


def _weights(path: Path, content: Any) -> TorchFile:
    if isinstance(content, Mapping):
        if content and all(isinstance(value, torch.Tensor) for value in content.values()):
            return TorchFile(path, None, _lazy(content), {}, ())
        for name in CONTAINERS:
            inside = content.get(name)
            if isinstance(inside, Mapping) and any(
                isinstance(value, torch.Tensor) for value in inside.values()
            ):
                foreign = [k for k, v in inside.items() if not isinstance(v, torch.Tensor)]
                if foreign:
                    raise CheckpointError(
                        f"{path}: {name}[{foreign[0]!r}] is a "
                        f"{type(inside[foreign[0]]).__name__}, expected a tensor"
                    )
                others = {k: v for k, v in content.items() if k != name}
                beside = {k: v for k, v in others.items() if _plain(v)}
                ignored = tuple(sorted(str(k) for k in others.keys() - beside.keys()))
                return TorchFile(path, name, _lazy(inside), beside, ignored)
    found = sorted(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
    raise CheckpointError(
        f"{path}: no weights found; expected tensors by name, at the top or under one of "
        f"{', '.join(CONTAINERS)}; found {str(found)[:200]}"
    )


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _lazy(tensors: Mapping[str, torch.Tensor]) -> dict[str, LazyTensor]:
    return {str(name): LazyTensor.of(tensor.detach()) for name, tensor in tensors.items()}


def write_torch(
    path: Path, tensors: Tensors, container: str | None, beside: Mapping[str, Any]
) -> None:
    """Writes a file of ``torch.save``; mapped tensors are copied without passing through memory."""
    weights = {name: tensor.make().contiguous() for name, tensor in tensors.items()}
    torch.save({**beside, container: weights} if container else weights, path)


def read_safetensors(directory: str | Path, stem: str) -> dict[str, LazyTensor]:
    """Maps ``stem.safetensors``, or the shards that ``stem.safetensors.index.json`` lists.

    Raises:
        CheckpointError: if a file is missing or damaged, or a shard lacks a tensor of the index.
    """
    directory = Path(directory)
    index = directory / f"{stem}.safetensors.index.json"
    places: dict[str, str] | None = None
    try:
        if index.is_file():
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values())) if places else [f"{stem}.safetensors"]
        tensors: dict[str, LazyTensor] = {}
        for name in files:
            with safe_open(directory / name, "pt") as opened:
                tensors |= _lazy({key: opened.get_tensor(key) for key in opened.keys()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory}: {stem}.safetensors cannot be read ({error}); fetch or make it again"
        ) from None
    if places is not None and (lost := sorted(places.keys() - tensors.keys())):
        raise CheckpointError(f"{directory}: {lost[0]} is in {index.name}, but in no shard")
    return tensors


def write_safetensors(
    directory: Path, stem: str, tensors: Tensors, shard_bytes: int | None = None
) -> None:
    """Writes ``stem.safetensors``, or shards with an index as diffusers and transformers read them.

    Args:
        directory: made if absent.
        stem: ``model`` for transformers, ``diffusion_pytorch_model`` for diffusers.
        tensors: made shard by shard.
        shard_bytes: how large a shard may be, where a tensor allows it; None writes one file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(tensors, shard_bytes))
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"{stem}{part}.safetensors"
        save_file(_separate(tensors, names), directory / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text(directory / f"{stem}.safetensors.index.json", json.dumps(index, indent=1))


def _separate(tensors: Tensors, names: list[str]) -> dict[str, torch.Tensor]:
    """Makes tensors; safetensors refuses two names for one memory (T5 ties its embeddings)."""
    made: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name in names:
        tensor = tensors[name].make().contiguous()
        if tensor.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        made[name] = tensor
    return made


def _shards(tensors: Tensors, limit: int | None) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and limit is not None and size + tensor.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def merge_lora(weights: Tensors, adapter: Tensors, scale: float) -> dict[str, LazyTensor]:
    """Folds a PEFT adapter into the weights it stands on: W + scale B A, computed in float32.

    Args:
        weights: of the base, by its own names.
        adapter: ``base_model.model.<module>.lora_{A,B}.weight``, and weights that were trained
            whole under their own names behind the same prefix.
        scale: alpha / rank.
    """
    merged = dict(weights)
    for name, tensor in adapter.items():
        name = name.removeprefix(PEFT_PREFIX)
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            up = adapter[f"{PEFT_PREFIX}{module}.lora_B.weight"]
            merged[f"{module}.weight"] = _folded(weights[f"{module}.weight"], up, tensor, scale)
        elif not name.endswith(".lora_B.weight"):
            merged[name] = tensor
    return merged


def _folded(base: LazyTensor, up: LazyTensor, down: LazyTensor, scale: float) -> LazyTensor:
    def make() -> torch.Tensor:
        change = up.make().float() @ down.make().float()
        return (base.make().float() + scale * change).to(base.dtype)

    return LazyTensor(base.shape, base.dtype, make)
