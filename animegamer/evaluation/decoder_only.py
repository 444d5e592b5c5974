"""The decoder by itself: held-out shots drawn again from their true representation."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from animegamer.drawing import ShotDrawer, ShotReader
from animegamer.evaluation import metrics
from animegamer.evaluation.metrics import Figure
from animegamer.evaluation.probes import Probe, read_frames
from animegamer.evaluation.truth import Outcome, read_truth
from animegamer.game import MotionScope
from animegamer.records import Shot
from animegamer.video import read_video

SCORES = {
    "character": metrics.right_characters,
    "motion": metrics.right_motion,
    "background": metrics.right_background,
    "acc_f": metrics.right_level,
    "mae_f": metrics.level_error,
}


def redraw(
    drawer: ShotDrawer, reader: ShotReader, directory: str | Path, shots: Sequence[Shot], seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Draws held-out shots from true first frame, action text and motion scope.

    Args:
        drawer: the decoder to measure.
        reader: its encoder.
        directory: where the shots' ``shots.jsonl`` is.
        shots: their records.
        seed: of sampling.

    Returns:
        True and generated shots, uint8 (F, H, W, 3) each.
    """
    drawn = [read_video(Path(directory) / shot.clip) for shot in shots]
    first = np.stack([video[0] for video in drawn])
    s_a = reader.read(first, [shot.action for shot in shots])
    scopes = [MotionScope(shot.motion_level) for shot in shots]
    seeds = [(seed + zlib.crc32(shot.episode.encode()), shot.turn) for shot in shots]
    generated = list(
        tqdm(
            drawer.draw_each(s_a, scopes, seeds),
            total=len(shots),
            desc="drawing held-out shots",
            unit="shot",
        )
    )
    return drawn, generated


def judge_redrawn(
    probe: Probe,
    edges: Sequence[float],
    shots: Sequence[Shot],
    drawn: Sequence[np.ndarray],
    generated: Sequence[np.ndarray],
    resamples: int,
) -> tuple[dict[str, Figure], list[Outcome]]:
    """Figures of redrawn shots: who, what, where, motion level, PSNR in dB, sharpness.

    Args:
        probe: the classifier.
        edges: borders between the world's motion levels.
        shots: the records.
        drawn: true shots.
        generated: what the decoder made of them.
        resamples: bootstrap draws.
    """
    outcomes = [
        Outcome(shot.episode, shot.turn, shot.language, read_truth(shot), given)
        for shot, given in zip(shots, read_frames(probe, generated, edges), strict=True)
    ]
    figures = {name: metrics.share(outcomes, score, resamples) for name, score in SCORES.items()}
    pairs = list(zip(shots, generated, drawn, strict=True))
    figures["psnr_db"] = metrics.mean(
        [(s.episode, metrics.psnr(g, d)) for s, g, d in pairs], resamples
    )
    figures["sharpness"] = metrics.ratio(
        [(s.episode, metrics.gradient_energy(g), metrics.gradient_energy(d)) for s, g, d in pairs],
        resamples,
    )
    return figures, outcomes
