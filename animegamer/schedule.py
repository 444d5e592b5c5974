"""What a step of a training run is: its learning rate, how many samples it sees, and which.

Samples are numbered without end (``data.Shuffle``). A step takes the next ones, however many
processes and micro-batches share them, so a dataset's size need not divide by anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from animegamer.config import TrainConfig


def learning_rate_factor(config: TrainConfig, step: int) -> float:
    """Share of the peak rate at ``step`` (0 is the first)."""
    rise = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.schedule == "constant":
        return rise
    done = max(0, step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return rise * (config.min_lr_share + (1 - config.min_lr_share) * fall)


@dataclass(frozen=True)
class SampleSchedule:
    """Which samples a step sees.

    Deviation: the paper's base has learnt images before; ours learns them in the first
    ``train.first_frame_share`` of its steps, where one latent frame costs a fifth.

    Attributes:
        train: batch sizes, micro-batches, steps and the share of first frames.
        processes: how many share a step.
    """

    train: TrainConfig
    processes: int = 1

    @property
    def image_steps(self) -> int:
        """Steps on first frames, at the start."""
        return round(self.train.steps * self.train.first_frame_share)

    def micro_batch(self, step: int) -> tuple[int, int | None]:
        """Samples of a process's micro-batch, and its latent frames (None is all)."""
        if step < self.image_steps:
            return self.train.first_frame_batch or self.train.batch_size, 1
        return self.train.batch_size, None

    def samples(self, step: int) -> int:
        """Samples of a step, all processes and micro-batches together."""
        return self.micro_batch(step)[0] * self.train.accumulate * self.processes

    def before(self, step: int) -> int:
        """Samples of all steps before ``step``."""
        images = min(step, self.image_steps)
        return images * self.samples(0) + (step - images) * self.samples(self.image_steps)

    def firsts(self, step: int, cursor: int, process: int) -> list[int]:
        """First sample of each micro-batch of a process, in a step that begins at ``cursor``."""
        size, parts = self.micro_batch(step)[0], self.train.accumulate
        return [cursor + (part * self.processes + process) * size for part in range(parts)]

    def split(self) -> dict[str, int]:
        """How a step is divided, for a checkpoint."""
        train = self.train
        return {
            "processes": self.processes,
            "accumulate": train.accumulate,
            "batch_size": train.batch_size,
            "first_frame_batch": train.first_frame_batch or train.batch_size,
        }
