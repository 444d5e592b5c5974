"""What the full scale takes on a GPU, measured with random weights, in under 8 minutes.

    python benchmarks/gpu_check.py               # on a GPU with 80 GB or more
    python benchmarks/gpu_check.py --size small  # its miniature, on a CPU too

Measures seconds a turn of the MLLM and of the decoder, seconds a step and peak memory of every
stage beside the planned ones, what half precision does to the reference tensors of
``tests/data/parity``, and, with two layers of each network, whether the presets in
``configs/full/memory`` play as the plain configuration does. Nothing is downloaded, and no
full-size weights are written. What does not fit is reported, and the rest goes on.

Writes ``gpu_check.json`` and ``gpu_check.md``. Exit status 1: a part failed, or a result is outside
its tolerance.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("stage1_warmup", "stage1_joint", "stage2", "stage3")
PLAYED = ("play", "memory/one_large")
PLAYED_LAST = ("memory/one_24gb", "memory/one_8gb")  # if there is time
PARTS = ("play", "train", "parity", "memory", "play more")
_SIZES = ROOT / "benchmarks" / "small"
# Widths at which weights, activations and gradients all weigh in, and a step takes no second.
SMALL = [
    "backbones.text_tokens=6",
    "backbones.visual_tokens=24",
    "decoder.motion_scope_hidden=16",
    "decoder.lora.rank=4",
    "mllm.lora.rank=4",
    "mllm.max_turn_tokens=80",
    *(f"backbones.{path.stem}=none" for path in sorted(_SIZES.glob("*.json"))),
    f"plan.sizes={_SIZES}",
]
# CPUs are slow at half convolutions, in float16 above all.
_QUICK = ["sampling.steps=2", "train.batch_size=1", "play.autoencoder_precision=bf16"]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="later than 85 %% of them nothing starts"
    )
    parser.add_argument("--output", type=Path, default=Path("results/gpu_check"))
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as train.batch_size=1"
    )
    options = parser.parse_intermixed_args(arguments)
    from benchmarks.report import Report

    overrides = [*(SMALL + _QUICK if options.size == "small" else []), *options.overrides]
    try:
        load = _loader(overrides)
        load("play")
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    report = Report(options.size, options.overrides, options.output)
    deadline = time.monotonic() + 0.85 * 60 * options.minutes
    for part, measure in _measures(load, report.device, options.only):
        report.take(part, measure, late=time.monotonic() > deadline)
    print(report.markdown())
    print(f"written to {options.output}")
    return 0 if report.passed else 1


def _loader(overrides: list[str]) -> Callable[..., Any]:
    """Loads a file of ``configs/full`` by name, devices put where this machine has them."""
    from animegamer import config as configuration
    from benchmarks.report import here

    def load(name: str, *more: str) -> Any:
        path = ROOT / "configs" / "full" / f"{name}.yaml"
        return here(configuration.load(path, [*overrides, *more]))

    return load


def _measures(
    load: Callable[..., Any], device: str, parts: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, Callable[[], dict[str, Any]]]]]:
    """Everything to measure, in its order: the part, a name, and what measures it."""
    from benchmarks.full_size import play_game, train_stage
    from benchmarks.half_precision import comparisons
    from benchmarks.presets import preset_checks

    if "play" in parts:
        for name in PLAYED:
            yield "play", (name, lambda name=name: play_game(load(name), device))
    if "train" in parts:
        for name in STAGES:
            yield "train", (name, lambda name=name: train_stage(load(name), device))
    if "parity" in parts:
        for check in comparisons(device):
            yield "parity", check
    if "memory" in parts:
        for check in preset_checks(load, device):
            yield "memory", check
    if "play more" in parts:
        for name in PLAYED_LAST:
            yield "play", (name, lambda name=name: play_game(load(name), device))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for benchmarks and for the fixtures of tests, no package's
    sys.exit(main())
