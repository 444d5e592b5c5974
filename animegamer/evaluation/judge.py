"""Judging: generated shots, and the drawn ones that set the ceiling, are read by the same eyes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from animegamer.atomic import write_text
from animegamer.evaluation.games import GameSet
from animegamer.evaluation.metrics import gradient_energy, psnr
from animegamer.evaluation.play import PlayedSet
from animegamer.evaluation.probes import Probe, head_accuracy, read_frames
from animegamer.evaluation.truth import Outcome, Reading, game_name, read_truth, showings
from animegamer.game import CharacterState
from animegamer.records import Shot
from animegamer.video import read_video

_CHUNK = 16


@dataclass(frozen=True)
class Judged:
    """Shots as read by the judges, in the order of ``GameSet.shots()``.

    Attributes:
        readings: what each shows; None for a shot that is missing.
        energies: mean squared gradient of each, 0 for a missing one.
        psnrs: dB against the drawn shot, or empty where that means nothing.
    """

    readings: list[Reading | None]
    energies: list[float]
    psnrs: list[float]


def judge_played(probe: Probe, edges: Sequence[float], played: PlayedSet) -> Judged:
    """Reads the generated shots of a set.

    Args:
        probe: the classifier.
        edges: borders between the world's motion levels.
        played: the set.
    """
    readings: list[Reading | None] = [None] * len(played.states)
    energies = [0.0] * len(played.states)
    there = [row for row, state in enumerate(played.states) if state is not None]
    starts = range(0, len(there), _CHUNK)
    for start in tqdm(starts, desc="judging generated shots", unit="batch", leave=False):
        rows = there[start : start + _CHUNK]
        frames = [np.asarray(played.frames[row]) for row in rows]
        for row, shot, seen in zip(rows, frames, read_frames(probe, frames, edges), strict=True):
            state = played.states[row]
            assert state is not None and state.motion_scope is not None
            level = state.motion_scope.level
            readings[row] = replace(seen, change=state.change, predicted_level=level)
            energies[row] = gradient_energy(shot)
    return Judged(readings, energies, [])


def judge_drawn(
    probe: Probe, edges: Sequence[float], games: GameSet, through: Callable[[Any], Any]
) -> tuple[Judged, Judged]:
    """Reads the drawn shots of a set: as they are, and as the first stage gives them back.

    Args:
        probe: the classifier.
        edges: borders between the world's motion levels.
        games: the set.
        through: the first stage: float (B, 3, F, H, W) in [-1, 1] to the same.

    Returns:
        Drawn shots, reconstructed shots (with ``psnrs``); the reconstructions carry the true
        state change, since nothing is predicted there.
    """
    plain, restored = Judged([], [], []), Judged([], [], [])
    shots = games.shots()
    rows = range(0, len(shots), _CHUNK)
    for start in tqdm(rows, desc=f"judging drawn shots of {games.name}", unit="batch", leave=False):
        part = shots[start : start + _CHUNK]
        drawn = [read_video(games.directory / shot.clip) for shot in part]
        again = reconstruct(drawn, through)
        plain.readings.extend(read_frames(probe, drawn, edges))
        plain.energies.extend(gradient_energy(shot) for shot in drawn)
        restored.readings.extend(
            replace(seen, change=shot.change, predicted_level=shot.motion_level)
            for seen, shot in zip(read_frames(probe, again, edges), part, strict=True)
        )
        restored.energies.extend(gradient_energy(shot) for shot in again)
        restored.psnrs.extend(psnr(a, d) for a, d in zip(again, drawn, strict=True))
    return plain, restored


@torch.no_grad()
def reconstruct(frames: Sequence[np.ndarray], through: Callable[[Any], Any]) -> list[np.ndarray]:
    """Shots after a way through the first stage.

    Args:
        frames: uint8 (F, H, W, 3) each, all of one size.
        through: float (B, 3, F, H, W) in [-1, 1] to the same.
    """
    video = torch.from_numpy(np.stack(frames)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    back = ((through(video).float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return list(back.permute(0, 2, 3, 4, 1).contiguous().cpu().numpy())


def outcomes(games: GameSet, judged: Judged) -> list[Outcome]:
    """Truth and judgement of a set, turn by turn."""
    shown = {
        shot.shot_id: distances
        for episode in games.episodes
        for shot, distances in zip(episode.shots, showings(episode.shots), strict=True)
    }
    return [
        Outcome(
            game=game_name(shot),
            turn=shot.turn,
            language=shot.language,
            truth=read_truth(shot),
            given=given,
            showings=shown[shot.shot_id],
        )
        for shot, given in zip(games.shots(), judged.readings, strict=True)
    ]


def probe_accuracy(shots: Sequence[Shot], judged: Judged) -> dict[str, float]:
    """Accuracy of each head on drawn or reconstructed shots."""
    return head_accuracy([r for r in judged.readings if r is not None], shots)


def kept(path: str | Path, key: str, make: Callable[[], list[Judged]]) -> list[Judged]:
    """Judgements from a file if it has this key; else made, and kept there.

    Args:
        path: JSON file.
        key: names everything that the judgements depend on.
        make: judges.
    """
    path = Path(path)
    if path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] == key:
            return [
                Judged([_reading(r) for r in j["readings"]], j["energies"], j["psnrs"])
                for j in stored["judged"]
            ]
    judged = make()
    rows = [
        {"readings": [_plain(r) for r in j.readings], "energies": j.energies, "psnrs": j.psnrs}
        for j in judged
    ]
    write_text(path, json.dumps({"key": key, "judged": rows}))
    return judged


def _plain(reading: Reading | None) -> dict[str, Any] | None:
    if reading is None:
        return None
    return {**asdict(reading), "characters": sorted(reading.characters)}


def _reading(row: dict[str, Any] | None) -> Reading | None:
    if row is None:
        return None
    change = CharacterState(**row["change"]) if row["change"] is not None else None
    return Reading(**{**row, "characters": frozenset(row["characters"]), "change": change})
