"""The run directory: atomic checkpoints, resume, pruning, strict loading.

A checkpoint ``step_0000500/`` holds safetensors and JSON only, so loading it never runs code. It is
written under a temporary name, synced and renamed: a killed process leaves the old ones whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from animegamer.atomic import write_text
from animegamer.config import Config, ConfigError, differences, from_tree, save, to_tree

_STEP = re.compile(r"step_(\d{7,})$")


class CheckpointError(RuntimeError):
    """A checkpoint or run directory that cannot be used; the message says what to do."""


class RunDirectory:
    """One training run on disk.

    Args:
        path: the directory; made if absent.
        config: the resolved configuration of the run that is to start or to go on.

    Raises:
        CheckpointError: if the directory holds a run with another configuration.
    """

    # What may change between two starts of one run without changing its results. How many samples
    # a step sees may not, however they are divided: the training loop checks it.
    FREE = (
        "train.run",
        "train.threads",
        "train.keep",
        "train.save_every",
        "train.parallel",
        "train.processes",
        "train.checkpoint",
        "train.timeout_minutes",
        "train.batch_size",
        "train.first_frame_batch",
        "train.accumulate",
        "decoder.gradient_checkpointing",
        "mllm.gradient_checkpointing",
        "data.workers",
    )
    FREE_SECTIONS = ("play", "evaluate", "assemble", "plan")

    def __init__(self, path: str | Path, config: Config) -> None:
        self.path = Path(path)
        self.config = config
        self.path.mkdir(parents=True, exist_ok=True)
        stored = self.path / "config.yaml"
        self.started = to_tree(config)  # what the run was started with
        if stored.is_file():
            self.started = _complete(yaml.safe_load(stored.read_text(encoding="utf-8")))
            changed = [
                line
                for line in differences(self.started, to_tree(config))
                if line.split(":")[0] not in self.FREE
                and line.split(".")[0] not in self.FREE_SECTIONS
            ]
            if changed:
                raise CheckpointError(
                    f"{self.path} holds a run with another configuration: {'; '.join(changed)}. "
                    "Undo the change, or set train.run to a new directory"
                )
        else:
            save(config, stored)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        found = []
        for child in self.path.iterdir():
            match = _STEP.match(child.name)
            if match and (child / "state.json").is_file():
                found.append(int(match.group(1)))
        return sorted(found)

    def checkpoint(self, step: int) -> Path:
        """Directory of the checkpoint of ``step``."""
        return self.path / f"step_{step:07d}"

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint and its ``state.json``, or None at the start of a run.

        Raises:
            CheckpointError: if ``state.json`` is damaged.
        """
        steps = self.steps()
        if not steps:
            return None
        directory = self.checkpoint(steps[-1])
        try:
            state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
            if not {"step", "parents", "finished"} <= state.keys():
                raise ValueError("an entry is missing")
        except (ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{directory / 'state.json'} is damaged ({error}): delete {directory}, and the "
                "checkpoint before it is used"
            ) from None
        return directory, state

    def save(
        self, step: int, state: dict[str, Any], write: Callable[[Path], None], keep: int
    ) -> Path:
        """Writes a checkpoint, whole or not at all, then prunes the oldest.

        Args:
            step: optimiser steps done.
            state: goes into ``state.json``.
            write: writes the weights into the directory it is given.
            keep: how many checkpoints stay.

        Raises:
            CheckpointError: if it cannot be written; the older checkpoints are untouched.
        """
        final = self.checkpoint(step)
        temporary = self.path / f".{final.name}.{os.getpid()}"
        for left in self.path.glob(".step_*"):  # by a process that was killed while it saved
            shutil.rmtree(left, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            write(temporary)
            write_text(temporary / "state.json", json.dumps({"step": step, **state}, indent=1))
            _sync(temporary)
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
        except (OSError, SafetensorError) as error:  # safetensors: a full disk is one of its own
            raise CheckpointError(
                f"cannot save {final}: {error}. Older checkpoints are whole; make room and run "
                "the same command again"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in self.steps()[:-keep]:
            shutil.rmtree(self.checkpoint(old))
        return final


def _complete(stored: dict[str, Any]) -> dict[str, Any]:
    """A run's settings with the defaults of those that came after it was started."""
    try:
        return to_tree(from_tree(stored))
    except ConfigError:  # of a setting that is gone: named as changed
        return stored


def _sync(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def replace_directory(path: str | Path, write: Callable[[Path], None]) -> None:
    """Writes a directory under a temporary name and puts it in the place of ``path``.

    Raises:
        CheckpointError: if it cannot be written; what was at ``path`` is untouched.
    """
    path = Path(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}"
    for left in path.parent.glob(f".{path.name}.*"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        _sync(temporary)
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_model(kind: Any, directory: str | Path, *, unused: str = "", **options: Any) -> Any:
    """Loads a diffusers or transformers model strictly, from safetensors only.

    Both libraries fill what a file lacks with random numbers and only warn.

    Args:
        kind: the model's class.
        directory: where it lies.
        unused: regular expression of weights that the files may hold beyond the model's.
        options: further arguments of its ``from_pretrained``.

    Raises:
        CheckpointError: names the directory and what is missing, damaged or of another model.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(
            f"no {kind.__name__} at {directory}: run the step that makes it, or correct the path "
            "in the configuration"
        )
    try:
        model, report = kind.from_pretrained(
            str(directory),
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{directory}: not a whole {kind.__name__} ({reason})") from error
    for what in ("missing", "mismatched", "unexpected"):
        for name in sorted(map(str, report[f"{what}_keys"])):
            if what != "unexpected" or not unused or not re.match(unused, name):
                raise CheckpointError(
                    f"{directory}: weight {name} is {what}; the files are of another model than "
                    f"{kind.__name__} or of another version"
                )
    return model


def fingerprint(path: str | Path) -> str:
    """Short hash of a file's or directory's names, sizes and content.

    Of files over 64 MB only size, head and tail count, so that a 26 GB model costs no minutes.

    Raises:
        CheckpointError: if there is nothing at ``path``.
    """
    path = Path(path)
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    files = [f for f in files if not f.name.startswith(".")]
    if not files or not files[0].is_file():
        raise CheckpointError(f"nothing at {path}: check the path in the configuration")
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        digest.update(f"{name}:{size}:".encode())
        with file.open("rb") as stream:
            if size <= 64_000_000:
                digest.update(stream.read())
            else:
                digest.update(stream.read(1_000_000))
                stream.seek(-1_000_000, os.SEEK_END)
                digest.update(stream.read())
    return digest.hexdigest()[:16]


def exported(path: str | Path) -> Path:
    """The public weights under ``path``: a checkpoint directory, or a run's newest export.

    Raises:
        CheckpointError: if there are none.
    """
    path = Path(path)
    if any((path / part).is_dir() for part in ("encoder", "decoder", "mllm")):
        return path
    steps = sorted(
        (child for child in path.glob("step_*") if (child / "state.json").is_file()),
        key=lambda child: int(child.name[5:]),
    )
    if steps and (steps[-1] / "export").is_dir():
        return steps[-1] / "export"
    raise CheckpointError(
        f"no weights in {path}: expected encoder/, decoder/ or mllm/, or a training run's step_*; "
        "run the earlier stage, or correct train.init"
    )


def tensors_fingerprint(directory: str | Path, without: tuple[str, ...] = ()) -> str:
    """Short hash of the tensors in a directory's safetensors files.

    Args:
        directory: of a model.
        without: tensors whose names begin so do not count.

    Raises:
        CheckpointError: if there are no such tensors, or a file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    digest, found = hashlib.sha256(), False
    for file in sorted(Path(directory).glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as tensors:
                for name in sorted(tensors.keys()):
                    if not name.startswith(without):
                        digest.update(name.encode() + tensors.get_tensor(name).tobytes())
                        found = True
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged ({error}): fetch or make it again") from None
    if not found:
        raise CheckpointError(f"no weights in {directory}: check the path in the configuration")
    return digest.hexdigest()[:16]
