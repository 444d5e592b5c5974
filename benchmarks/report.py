"""Figures of the GPU check as they come in, what stopped the others, and both files of results."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from animegamer.atomic import write_text
from animegamer.config import Config, ConfigError

GB = 1e9
_PACKAGES = ("torch", "transformers", "diffusers", "peft", "accelerate", "bitsandbytes")
_TITLES = {
    "play": "Play, one game: seconds a turn, a full window in view",
    "train": "Training, one step on one device",
    "parity": "Half precision against the reference tensors: relative error",
    "memory": "Memory presets, two layers of each network, on one device, against the plain one",
}


class NotHere(Exception):
    """Something that this machine cannot measure, which is no failure."""


@dataclass
class Row:
    """What one measurement gave.

    Attributes:
        part: ``play``, ``train``, ``parity`` or ``memory``.
        name: of what was measured.
        figures: by what they say; None where there is no such figure here.
        note: why there are none, or what else is to be known.
        passed: False if it failed, or is outside its tolerance.
    """

    part: str
    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    passed: bool = True


def here(config: Config) -> Config:
    """The configuration with all of play on one device: the first GPU, or a CPU where none is.

    What a preset leaves to the CPU stays there.
    """
    gpu = torch.cuda.is_available()
    memory = config.play.memory
    devices = {
        key: "cpu" if getattr(memory, key) == "cpu" else None
        for key in ("mllm_device", "decoder_device", "reader_device")
    }
    play = replace(config.play, device="cuda" if gpu else "cpu", memory=replace(memory, **devices))
    return replace(config, play=play)


def used(device: str) -> int:
    """Bytes of tensors on the device, and the start of a new peak; 0 on a CPU."""
    if torch.device(device).type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(device: str, before: int) -> float | None:
    """GB above ``before`` since the last ``used``; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GB


def clock(device: str) -> float:
    """Seconds, when the device has done what it was asked for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Report:
    """All rows, written after each, so that a run that is killed leaves what it has.

    Args:
        size: ``full`` or ``small``.
        overrides: of the command line.
        directory: where ``gpu_check.json`` and ``gpu_check.md`` go.
    """

    def __init__(self, size: str, overrides: list[str], directory: Path) -> None:
        gpu = torch.cuda.is_available()
        self.device = "cuda" if gpu else "cpu"
        self.directory, self.rows = directory, list[Row]()
        self.about = {
            "size": size,
            "overrides": " ".join(overrides) or "none",
            "card": torch.cuda.get_device_name() if gpu else f"none ({platform.machine()} CPU)",
            "memory (GB)": torch.cuda.get_device_properties(0).total_memory / GB if gpu else None,
            "CUDA": torch.version.cuda if gpu else None,
            "Python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        }

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(row.passed for row in self.rows)

    def take(
        self, part: str, measure: tuple[str, Callable[[], dict[str, Any]]], late: bool = False
    ) -> None:
        """Measures one thing; if that stops, notes why.

        Args:
            part: of the report.
            measure: a name, and what gives its figures; ``passed`` among them is none.
            late: the time is up: only note that.
        """
        name, function = measure
        row = Row(part, name)
        begin = time.monotonic()
        try:
            if late:
                row.note = "not measured: the time is up"
            else:
                row.figures = function()
                row.passed = row.figures.pop("passed", True)
                row.note = row.figures.pop("note", "" if row.passed else "outside its tolerance")
        except torch.OutOfMemoryError:
            row.note = "out of memory"
        except (ConfigError, NotHere) as error:
            row.note = f"not measured: {error}"
        except Exception as error:  # whatever it is, the other parts are worth having
            traceback.print_exc(file=sys.stderr)
            row.note, row.passed = f"failed: {type(error).__name__}: {str(error)[:200]}", False
        if self.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        self.rows.append(row)
        spent = time.monotonic() - begin
        print(f"{part} {name}: {row.note or 'done'}, {spent:.1f} s", file=sys.stderr, flush=True)
        self._write()

    def _write(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        tree = {"about": self.about, "rows": [asdict(row) for row in self.rows]}
        write_text(self.directory / "gpu_check.json", json.dumps(tree, indent=1) + "\n")
        write_text(self.directory / "gpu_check.md", self.markdown())

    def markdown(self) -> str:
        """The report as a page; GB are 1e9 bytes."""
        lines = ["# GPU check", ""]
        lines += [f"- {name}: {_text(value)}" for name, value in self.about.items()]
        for part, title in _TITLES.items():
            rows = [row for row in self.rows if row.part == part]
            columns = list(dict.fromkeys(key for row in rows for key in row.figures))
            if rows:
                lines += ["", f"## {title}", "", _line("", *columns, "note")]
                lines.append(_line(*["---"] * (len(columns) + 2)))
            for row in rows:
                values = (_text(row.figures.get(column)) for column in columns)
                lines.append(_line(row.name, *values, row.note.replace("|", "/")))
        return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
