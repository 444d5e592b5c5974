"""Learning curves of training runs as one picture, from their ``metrics.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

SHOWN = (
    "loss",
    "validation/loss",
    "validation/psnr",
    "validation/acc_f",
    "validation/mse",
    "validation/accuracy_motion",
    "validation/accuracy_state",
    "psnr",
    "accuracy",
)
"""Metrics worth a curve, where a run has them."""


def read_metrics(run: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of every metric of a run.

    Raises:
        FileNotFoundError: if the run has no ``metrics.jsonl``.
    """
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: not a training run, or one that never logged")
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name not in ("step", "time"):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(value)
    return curves


def draw_curves(runs: Sequence[str | Path], path: str | Path) -> None:
    """Draws a row of curves for each run.

    Args:
        runs: run directories.
        path: the PNG.
    """
    import matplotlib
    import numpy as np
    from PIL import Image

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = []
    for run in runs:
        curves = read_metrics(run)
        rows.append((Path(run).name, [(n, curves[n]) for n in SHOWN if n in curves]))
    columns = max(len(shown) for _, shown in rows)
    figure, axes = pyplot.subplots(
        len(rows), columns, figsize=(3.2 * columns, 2.2 * len(rows)), dpi=90, squeeze=False
    )
    for row, (name, shown) in zip(axes, rows, strict=True):
        for axis in row[len(shown) :]:
            axis.axis("off")
        for axis, (metric, (steps, values)) in zip(row, shown, strict=False):
            axis.plot(steps, values, linewidth=1, marker="." if len(steps) < 12 else None)
            axis.set_title(f"{name}: {metric}", fontsize=8)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3])
    picture.quantize(64, dither=Image.Dither.NONE).save(path)  # a third of the size
    pyplot.close(figure)
