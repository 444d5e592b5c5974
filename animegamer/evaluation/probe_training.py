"""Training of the probes: drawn shots only, spoilt in the ways in which generated shots are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from animegamer.evaluation.probes import (
    Probe,
    ProbeError,
    Vocabulary,
    encode,
    loss_of,
    pick,
    to_input,
)
from animegamer.records import Shot, read_shots
from animegamer.video import read_video

PATCH = 8
KEPT = (12, 20, 32, 48, 80)
"""Components that the patch blur may keep, of the 192 of an 8 x 8 colour patch."""


@dataclass(frozen=True)
class ProbeSettings:
    """How probes are trained.

    Attributes:
        steps: optimiser steps.
        batch_size: shots a step.
        lr: peak learning rate of a one-cycle schedule.
        width: channels of the probe's last feature map.
        seed: of weights, order and augmentation.
    """

    steps: int = 2000
    batch_size: int = 32
    lr: float = 3e-3
    width: int = 96
    seed: int = 0


def load_shots(directories: Sequence[str | Path]) -> tuple[np.ndarray, list[Shot]]:
    """Drawn shots to train on, with their hidden attributes.

    Args:
        directories: each with ``shots.jsonl`` and ``clips/``.

    Returns:
        Picked frames, uint8 (n, P, H, W, 3), and the records.
    """
    found = [
        (Path(directory) / shot.clip, shot)
        for directory in directories
        for shot in read_shots(Path(directory) / "shots.jsonl", hidden=True)
    ]
    if not found:
        raise ProbeError(f"no shots in {', '.join(map(str, directories))}: nothing to train on")
    shape = pick(read_video(found[0][0])).shape
    frames = np.empty((len(found), *shape), np.uint8)
    for row, (path, _) in enumerate(tqdm(found, desc="reading the probes' shots", unit="shot")):
        frames[row] = pick(read_video(path))
    return frames, [shot for _, shot in found]


def patch_basis(frames: np.ndarray, sample: int = 400) -> torch.Tensor:
    """Principal directions of 8 x 8 colour patches.

    Args:
        frames: uint8 (n, P, H, W, 3).
        sample: frames that are looked at.

    Returns:
        (192, 192) float, columns by falling variance.
    """
    every = max(1, len(frames) // sample)
    patches = _cut(to_input(frames[::every, :1]).flatten(0, 1))
    patches = patches - patches.mean(0)
    _, vectors = torch.linalg.eigh(patches.T @ patches)
    return vectors.flip(1)


def _cut(images: torch.Tensor) -> torch.Tensor:
    columns: torch.Tensor = F.unfold(images, PATCH, stride=PATCH).transpose(1, 2).flatten(0, 1)
    return columns


def spoil(frames: torch.Tensor, basis: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Drawn shots made a little like generated ones.

    Args:
        frames: (B, P, 3, H, W) float in [0, 1]; H and W multiples of 8.
        basis: from ``patch_basis``.
        generator: of all chance.

    Returns:
        The same shape. Nearly half of the batches pass a patch blur and nearly half a smoothing,
        some both; all get slight changes of colour, noise and place.
    """

    def chance(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator)

    batch, picks, _, height, width = frames.shape
    images = frames.flatten(0, 1)
    kind = float(chance(1))
    if kind < 0.45:
        kept = KEPT[int(torch.randint(len(KEPT), (1,), generator=generator))]
        keep = basis[:, :kept]
        columns = F.unfold(images, PATCH, stride=PATCH)
        centre = columns.mean((0, 2), keepdim=True)
        flat = (columns - centre).transpose(1, 2) @ keep @ keep.T
        images = F.fold(flat.transpose(1, 2) + centre, (height, width), PATCH, stride=PATCH)
    if kind > 0.7 or kind < 0.15:
        images = torch.lerp(
            images,
            F.avg_pool2d(images, 3, 1, 1, count_include_pad=False),
            0.2 + 0.8 * float(chance(1)),
        )
    images = images.unflatten(0, (batch, picks))
    gain = 1 + 0.12 * (chance(batch, 1, 3, 1, 1) - 0.5)
    lift = 0.06 * (chance(batch, 1, 3, 1, 1) - 0.5)
    images = images * gain + lift
    grain = torch.randn(batch, 1, 3, height, width, generator=generator)
    images = images + 0.06 * chance(1) * grain
    down, right = torch.randint(-2, 3, (2,), generator=generator).tolist()
    images = torch.roll(images, (down, right), (-2, -1))
    return images.clamp(0, 1)


def train_probe(
    frames: np.ndarray, shots: Sequence[Shot], settings: ProbeSettings
) -> tuple[Probe, dict[str, object]]:
    """Trains a probe.

    Args:
        frames: picked frames of drawn shots, uint8 (n, P, H, W, 3).
        shots: their records, read with hidden attributes.
        settings: how.

    Returns:
        The probe in evaluation mode, and what ``probe.json`` says about its training.

    Raises:
        ProbeError: if there are no shots or their number differs.
    """
    if len(frames) != len(shots) or not len(shots):
        raise ProbeError(f"{len(frames)} clips for {len(shots)} records; expected one each")
    started = time.monotonic()
    names = Vocabulary.of(shots)
    targets = encode(shots, names)
    basis = patch_basis(frames)
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        probe = Probe(names, settings.width)
    probe.train()
    optimiser = torch.optim.AdamW(probe.parameters(), settings.lr, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, settings.lr, total_steps=settings.steps, pct_start=0.15
    )
    progress = tqdm(range(settings.steps), desc="training the probes", unit="step")
    order = torch.empty(0, dtype=torch.long)
    size = min(settings.batch_size, len(shots))
    for step in progress:
        if len(order) < size:
            order = torch.randperm(len(shots), generator=generator)
        rows, order = order[:size], order[size:]
        images = spoil(to_input(frames[rows.numpy()]), basis, generator)
        loss = loss_of(probe(images), {key: value[rows] for key, value in targets.items()})
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 20 == 0:
            progress.set_postfix(loss=f"{float(loss.detach()):.3f}")
    seconds = round(time.monotonic() - started, 1)
    return probe.eval(), {"shots": len(shots), "seconds": seconds, **asdict(settings)}
