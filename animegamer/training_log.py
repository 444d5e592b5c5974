"""What a training run writes for people: metrics.jsonl, train.log, TensorBoard, a progress bar."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from animegamer.atomic import write_text
from animegamer.config import TrainConfig


class Log:
    """The log of one run, which goes on where a checkpoint was saved.

    Lines of metrics.jsonl after that checkpoint, and a half-written one, are dropped: their steps
    are done again. So every step stands there once, however often the run was killed.

    Args:
        path: run directory.
        train: how often and how long.
        start: steps done.
        pending: what ``pending()`` was at ``start``.
    """

    def __init__(
        self, path: Path, train: TrainConfig, start: int, pending: dict[str, Any] | None = None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        self.path, self.every = path, train.log_every
        self._drop_after(start)
        self.board = SummaryWriter(str(path / "tensorboard"), purge_step=start + 1)
        self.bar = tqdm(
            total=train.steps,
            initial=start,
            desc=path.name,
            unit="step",
            dynamic_ncols=True,
            mininterval=1 if sys.stderr.isatty() else 60,
        )
        pending = pending or {}
        self.count: int = pending.get("count", 0)
        self.sums = {k: torch.tensor(v) for k, v in pending.get("sums", {}).items()}
        self.timed, self.since = 0, time.perf_counter()

    def _drop_after(self, start: int) -> None:
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                continue
            if step <= start:
                kept.append(line + "\n")
        write_text(path, "".join(kept))

    def pending(self) -> dict[str, Any]:
        """What was summed up since the last line, for a checkpoint."""
        if not self.count:
            return {}
        return {"count": self.count, "sums": {k: float(v) for k, v in self.sums.items()}}

    def text(self, message: str) -> None:
        """A note for train.log."""
        with (self.path / "train.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def record(self, step: int, values: dict[str, float]) -> None:
        """A line of metrics.jsonl, and its TensorBoard scalars."""
        line = {"step": step, "time": round(time.time(), 1), **values}
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def step(
        self, step: int, loss: torch.Tensor, norm: Any, lr: float, metrics: dict[str, Any]
    ) -> None:
        """One optimiser step.

        Raises:
            FloatingPointError: at a line, if the mean loss is not finite.
        """
        self.bar.update()
        values = {"loss": loss.detach(), "grad_norm": torch.as_tensor(norm), **metrics}
        for name, value in values.items():
            value = torch.as_tensor(value).detach().float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.count, self.timed = self.count + 1, self.timed + 1
        if step % self.every:
            return
        means = {name: float(total) / self.count for name, total in self.sums.items()}
        if not math.isfinite(means["loss"]):
            raise FloatingPointError(
                f"loss is {means['loss']} before step {step}: lower train.lr, or use "
                "train.precision=no; the last checkpoint is whole"
            )
        seconds = (time.perf_counter() - self.since) / self.timed
        self.record(step, {**means, "lr": lr, "seconds_per_step": seconds})
        self.bar.set_postfix(loss=f"{means['loss']:.4f}")
        self.sums, self.count = {}, 0
        self.timed, self.since = 0, time.perf_counter()

    def validation(self, step: int, values: dict[str, float]) -> None:
        """Results of a validation."""
        self.record(step, {f"validation/{k}": float(v) for k, v in values.items()})
        self.text(f"step {step}: " + ", ".join(f"{k} {v:.4f}" for k, v in values.items()))
        self.timed, self.since = 0, time.perf_counter()

    def close(self, step: int, stopped: bool) -> None:
        """The end of the run, or of this part of it."""
        self.text(f"stopped at step {step}" if stopped else f"finished at step {step}")
        self.bar.close()
        self.board.close()
