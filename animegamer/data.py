"""Typed batches and the datasets that make them; training reads feature shards, never video.

What the ``index``-th sample is, and the noise on it, follows from the seed and the index alone: a
resumed run goes on with exactly the samples that were next, and any number of processes that share
them compute what one would.

Axis letters: B batch, F latent frames, C latent channels, H x W latent grid, N tokens of s_a, D
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from animegamer.features import FeatureStore
from animegamer.game import MotionScope
from animegamer.records import Shot


@dataclass
class ShotBatch:
    """Shots for stages 1 and 3.

    Attributes:
        latents: (B, F, C, H, W) float, scaled VAE latents.
        f_v: (B, N_v, W_v) float, CLIP patch tokens of the reference frame.
        f_md: (B, N_t, W_t) float, T5 states of the action text.
        f_ms: (B,) float, motion scope scalars.
        text_kept: (B,) bool, False where condition dropout empties the action text.
        image_kept: (B,) bool, False where it zeroes the visual reference.
        s_a_hat: (B, N, D) float, cached MLLM predictions; stage 3 only.
        seeds: one a sample, of its noise in training; empty where none is drawn by sample.
    """

    latents: torch.Tensor
    f_v: torch.Tensor
    f_md: torch.Tensor
    f_ms: torch.Tensor
    text_kept: torch.Tensor
    image_kept: torch.Tensor
    s_a_hat: torch.Tensor | None = None
    seeds: tuple[int, ...] = ()

    def to(self, device: torch.device) -> ShotBatch:
        """The batch on another device."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {k: v.to(device) for k, v in own.items() if isinstance(v, torch.Tensor)}
        return replace(self, **tensors)


def sample_seed(seed: int, index: int) -> int:
    """Seed of the noise on a sample, from the run's seed and the sample's number."""
    return int(np.random.default_rng((seed, 5, index)).integers(2**62))


class Shuffle:
    """An endless, seeded order over ``size`` items: a fresh permutation every epoch."""

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError("nothing to train on: the dataset is empty")
        self.size, self.seed = size, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, self.size)
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self.size)
            self._epoch = epoch
        return int(self._order[place])


class ShotDataset:
    """Shots with their cached features.

    Args:
        shots: the records; opening shots, which have no action text, are left out.
        features: store of ``f_v``, ``f_md`` and ``latents``.
        seed: of the order and of condition dropout.
        text_dropout: share of action texts emptied (release: 0.05).
        image_dropout: share of visual references zeroed (release: 0.05), independently.
        predictions: store of ``s_a_hat``, or None.
        random_frame: take ``f_v`` of a random frame (ablation "w/ rand. frame").
    """

    def __init__(
        self,
        shots: Sequence[Shot],
        features: FeatureStore,
        seed: int,
        *,
        text_dropout: float = 0.0,
        image_dropout: float = 0.0,
        predictions: FeatureStore | None = None,
        random_frame: bool = False,
    ) -> None:
        self.shots = [shot for shot in shots if shot.turn > 0 or shot.action]
        self.features, self.predictions, self.seed = features, predictions, seed
        self.text_dropout, self.image_dropout = text_dropout, image_dropout
        self.reference = "f_v_random" if random_frame else "f_v"
        self.order = Shuffle(len(self.shots), seed)
        for store in (features, predictions):
            if store is not None:
                missing = next((s.shot_id for s in self.shots if s.shot_id not in store), None)
                if missing is not None:
                    raise KeyError(f"no features of {missing!r} in {store.directory}: make them")

    def batch(self, first: int, size: int, frames: int | None = None) -> ShotBatch:
        """Samples ``first`` to ``first + size - 1`` of the endless order.

        Args:
            first: index of the first sample.
            size: B.
            frames: keep only so many latent frames (1 trains on first frames).
        """
        rows, kept = [], []
        for index in range(first, first + size):
            rows.append(self.shots[self.order[index]])
            draw = np.random.default_rng((self.seed, 1, index)).random(2)
            kept.append((draw[0] >= self.text_dropout, draw[1] >= self.image_dropout))
        seeds = tuple(sample_seed(self.seed, index) for index in range(first, first + size))
        return replace(self.collate(rows, np.array(kept), frames), seeds=seeds)

    def collate(
        self, shots: Sequence[Shot], kept: np.ndarray | None = None, frames: int | None = None
    ) -> ShotBatch:
        """A batch of the given shots; ``kept`` is (B, 2) bool: text, image."""
        arrays = [self.features[shot.shot_id] for shot in shots]

        def stack(parts: list[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.stack(parts)).float()

        if kept is None:
            kept = np.ones((len(shots), 2), dtype=bool)
        s_a_hat = None
        if self.predictions is not None:
            s_a_hat = stack([self.predictions[shot.shot_id]["s_a_hat"] for shot in shots])
        return ShotBatch(
            latents=stack([a["latents"][:frames] for a in arrays]),
            f_v=stack([a[self.reference] for a in arrays]),
            f_md=stack([a["f_md"] for a in arrays]),
            f_ms=torch.tensor([MotionScope(shot.motion_level).scalar for shot in shots]),
            text_kept=torch.from_numpy(kept[:, 0].copy()),
            image_kept=torch.from_numpy(kept[:, 1].copy()),
            s_a_hat=s_a_hat,
        )
