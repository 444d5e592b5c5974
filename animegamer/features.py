"""Feature shards: arrays by record name in safetensors files with one index.

Training reads these and never video. ``f_v``, ``f_md`` and latents of every shot are one store, the
MLLM's predictions another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file
from safetensors.numpy import save as serialize

from animegamer.atomic import write_bytes, write_text

EMPTY_TEXT = "empty_text.safetensors"
"""In a store of shots: f_md of the empty text, which a dropped action text becomes."""


class FeatureError(RuntimeError):
    """A feature store that is absent, incomplete or made by other networks."""


class FeatureWriter:
    """Writes shards; the index follows every shard, so an interrupted run goes on.

    Args:
        directory: where the shards go.
        source: names and fingerprints of what the features were made with.
        shard_size: records a shard.
        shard_bytes: a shard is closed at this size, too: records of 480 x 720 are 2 MB each.

    Raises:
        FeatureError: if the directory holds features from another source, or a damaged index.
    """

    def __init__(
        self,
        directory: str | Path,
        source: dict[str, str],
        shard_size: int = 2048,
        shard_bytes: int = 256_000_000,
    ) -> None:
        self.directory = Path(directory)
        self.shard_size, self.shard_bytes, self.bytes = shard_size, shard_bytes, 0
        self.pending: list[tuple[str, str, dict[str, np.ndarray]]] = []
        index = self.directory / "index.json"
        if index.is_file():
            self.index = _read_index(index)
            if self.index["source"] != source:
                raise FeatureError(
                    f"{self.directory} was made with {self.index['source']}, now {source}: "
                    "delete the directory to make the features again"
                )
        else:
            self.index = {"version": 1, "source": source, "shards": [], "rows": {}}

    def has(self, name: str, content: str) -> bool:
        """Whether the record is stored already, from the same content."""
        row = self.index["rows"].get(name)
        return row is not None and row[2] == content

    def add(self, name: str, content: str, arrays: dict[str, np.ndarray]) -> None:
        """Adds one record. ``content`` is the hash of what it was made from."""
        self.pending.append((name, content, arrays))
        self.bytes += sum(array.nbytes for array in arrays.values())
        if len(self.pending) >= self.shard_size or self.bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending as one shard, then the index."""
        if not self.pending:
            return
        number = len(self.index["shards"])
        file = f"shard_{number:05d}.safetensors"
        keys = self.pending[0][2].keys()
        # safetensors writes memory as it lies: a transposed view would be stored scrambled.
        stacked = {
            k: np.ascontiguousarray(np.stack([arrays[k] for _, _, arrays in self.pending]))
            for k in keys
        }
        write_bytes(self.directory / file, serialize(stacked))
        self.index["shards"].append(file)
        for row, (name, content, _) in enumerate(self.pending):
            self.index["rows"][name] = [number, row, content]
        write_text(self.directory / "index.json", json.dumps(self.index))
        self.pending, self.bytes = [], 0


def write_empty_text(directory: str | Path, f_md: np.ndarray) -> None:
    """Stores f_md of the empty text, (N_t, W_t), so that training needs no text encoder."""
    path, content = Path(directory) / EMPTY_TEXT, serialize({"f_md": np.ascontiguousarray(f_md)})
    if not path.is_file() or path.read_bytes() != content:
        write_bytes(path, content)


def read_empty_text(directory: str | Path) -> np.ndarray:
    """f_md of the empty text, (N_t, W_t) float32.

    Raises:
        FeatureError: if it is missing or damaged.
    """
    path = Path(directory) / EMPTY_TEXT
    try:
        return load_file(path)["f_md"].astype(np.float32)
    except (FileNotFoundError, SafetensorError, KeyError) as error:
        raise FeatureError(
            f"{path} is missing or damaged ({error}): run python -m data_pipeline.features again, "
            "which makes only what is missing"
        ) from None


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"source", "shards", "rows"} <= index.keys():
            raise ValueError("an entry is missing")
    except (ValueError, AttributeError) as error:
        raise FeatureError(
            f"{path} is damaged ({error}): delete {path.parent} and make the features again"
        ) from None
    return index


class FeatureStore(Mapping[str, dict[str, np.ndarray]]):
    """Reads feature shards: ``store[shot_id]["f_v"]``, memory-mapped.

    Args:
        directory: of the shards.
        source: what the features must have been made with; None accepts all.

    Raises:
        FeatureError: no index, a missing or damaged shard, or another source.
    """

    def __init__(self, directory: str | Path, source: dict[str, str] | None = None) -> None:
        self.directory = Path(directory)
        path = self.directory / "index.json"
        if not path.is_file():
            raise FeatureError(f"no features in {self.directory} (no index.json): make them first")
        self.index = _read_index(path)
        if source is not None and self.index["source"] != source:
            raise FeatureError(
                f"{self.directory} was made with {self.index['source']}, but the configuration "
                f"names {source}: make the features again"
            )
        self._shards: list[dict[str, Any]] = []
        for file in self.index["shards"]:
            try:
                handle = safe_open(self.directory / file, framework="np")
                self._shards.append({k: handle.get_slice(k) for k in handle.keys()})
            except (FileNotFoundError, SafetensorError) as error:
                raise FeatureError(
                    f"{self.directory / file} is missing or damaged ({error}): delete the "
                    "directory and make the features again"
                ) from None

    @property
    def source(self) -> dict[str, str]:
        """What the features were made with."""
        return dict(self.index["source"])

    def __getitem__(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of one record. Raises KeyError with what to do."""
        row = self.index["rows"].get(name)
        if row is None:
            raise KeyError(f"no features of {name!r} in {self.directory}: make them first")
        return {key: part[row[1]] for key, part in self._shards[row[0]].items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.index["rows"])

    def __len__(self) -> int:
        return len(self.index["rows"])
