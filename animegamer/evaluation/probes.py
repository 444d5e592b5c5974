"""Probes: a small classifier, trained on drawn shots only, that reads who does what where.

It never saw a generated shot, nor one from the first stage: augmentation (patch blur, noise,
colour, shift) makes it read those. Its accuracy on held-out drawn and reconstructed shots stands
in every report, because no figure that it judges can be better than it is.

Axis letters: B batch, P picked frames, C channels, H x W feature map, Q queries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import nn

from animegamer.atomic import write_bytes, write_text
from animegamer.evaluation.truth import NO_SCARF, Reading, read_truth
from animegamer.motion import level_of, motion_scope
from animegamer.records import Shot

PICKS = 6
"""Frames that a probe looks at, spread evenly over the shot."""
UNKNOWN = -100


class ProbeError(ValueError):
    """Probes that cannot be trained, read or used on these shots."""


@dataclass(frozen=True)
class Vocabulary:
    """What can be told apart: the names that occur in the records the probes train on."""

    characters: tuple[str, ...]
    motions: tuple[str, ...]
    places: tuple[str, ...]
    times: tuple[str, ...]
    scarves: tuple[str, ...]
    landmarks: tuple[str, ...]
    vehicles: tuple[str, ...]

    @classmethod
    def of(cls, shots: Iterable[Shot]) -> Vocabulary:
        """Collects the names in records that were read with their hidden attributes."""
        names: list[set[str]] = [set() for _ in range(7)]
        for shot in shots:
            truth = read_truth(shot)
            names[0] |= truth.characters
            names[1].add(truth.motion)
            names[2].add(truth.place)
            names[3].add(truth.time_of_day)
            for attribute, value in truth.attributes.items():
                kind = attribute.partition(":")[0]
                names[("scarf", "landmark", "vehicle").index(kind) + 4].add(value)
        if not all(names):
            empty = [
                f for f, found in zip(cls.__dataclass_fields__, names, strict=True) if not found
            ]
            raise ProbeError(f"the probes' training shots show no {', no '.join(empty)}")
        return cls(*(tuple(sorted(found)) for found in names))

    def heads(self) -> dict[str, int]:
        """Head to number of classes; every character has a presence and a scarf head."""
        return {
            "motion": len(self.motions),
            "place": len(self.places),
            "time": len(self.times),
            "landmark": len(self.landmarks),
            "vehicle": len(self.vehicles),
        }


def encode(shots: Sequence[Shot], names: Vocabulary) -> dict[str, torch.Tensor]:
    """Targets of the heads.

    Returns:
        ``motion``, ``place``, ``time``, ``landmark``, ``vehicle`` (B,) long, ``present`` (B, A)
        float and ``scarf`` (B, A) long, A characters; UNKNOWN where a shot does not show it.
    """
    rows: dict[str, list[object]] = {key: [] for key in (*names.heads(), "present", "scarf")}
    for shot in shots:
        truth = read_truth(shot)
        shown = truth.attributes
        rows["motion"].append(_index(names.motions, truth.motion))
        rows["place"].append(_index(names.places, truth.place))
        rows["time"].append(_index(names.times, truth.time_of_day))
        rows["landmark"].append(_index(names.landmarks, shown.get("landmark")))
        rows["vehicle"].append(_index(names.vehicles, shown.get("vehicle")))
        rows["present"].append([float(c in truth.characters) for c in names.characters])
        bare = NO_SCARF if "scarves" in shot.hidden else None
        rows["scarf"].append(
            [
                _index(names.scarves, shown.get(f"scarf:{c}", bare))
                if c in truth.characters
                else UNKNOWN
                for c in names.characters
            ]
        )
    return {
        key: torch.tensor(row, dtype=torch.float32 if key == "present" else torch.long)
        for key, row in rows.items()
    }


def _index(names: tuple[str, ...], name: str | None) -> int:
    return names.index(name) if name in names else UNKNOWN


class Probe(nn.Module):
    """Convolutions over the picked frames, then one attention pooling a question.

    Every character asks for itself whether it is there and which scarf it wears, so that a scarf
    goes with its wearer.

    Args:
        names: what can be told apart.
        width: channels of the last feature map.
    """

    def __init__(self, names: Vocabulary, width: int = 96) -> None:
        super().__init__()
        self.names, self.width = names, width
        steps = ((3 * PICKS, 40, 2), (40, 64, 2), (64, width, 2), (width, width, 1))
        self.features = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()
                )
                for a, b, stride in steps
            )
        )
        heads = names.heads()
        questions = len(names.characters) + len(heads)
        self.queries = nn.Parameter(torch.randn(questions, width) / width**0.5)
        self.mix = nn.Linear(2 * width, width)
        self.own = nn.Parameter(torch.randn(questions, width) * 0.02)
        self.present = nn.Linear(width, 1)
        self.scarf = nn.Linear(width, len(names.scarves))
        self.heads = nn.ModuleDict({head: nn.Linear(width, n) for head, n in heads.items()})

    def forward(self, frames: torch.Tensor) -> dict[str, torch.Tensor]:
        """Reads shots.

        Args:
            frames: (B, P, 3, H, W) float in [0, 1].

        Returns:
            Logits by head: (B, classes); ``present`` (B, A), ``scarf`` (B, A, colours).
        """
        maps = self.features(frames.flatten(1, 2) * 2 - 1)
        tokens = maps.flatten(2).transpose(1, 2)
        weights = (tokens @ self.queries.T).softmax(1)
        pooled = weights.transpose(1, 2) @ tokens
        everything = tokens.mean(1, keepdim=True).expand_as(pooled)
        answers = F.relu(self.mix(torch.cat([pooled, everything], -1)) + self.own)
        count = len(self.names.characters)
        logits = {
            "present": self.present(answers[:, :count]).squeeze(-1),
            "scarf": self.scarf(answers[:, :count]),
        }
        for i, (head, layer) in enumerate(self.heads.items()):
            logits[head] = layer(answers[:, count + i])
        return logits


def pick(frames: np.ndarray) -> np.ndarray:
    """The frames that a probe looks at: uint8 (..., F, H, W, 3) to (..., P, H, W, 3)."""
    count = frames.shape[-4]
    return np.ascontiguousarray(
        frames[..., np.linspace(0, count - 1, PICKS).round().astype(int), :, :, :]
    )


def to_input(picked: np.ndarray) -> torch.Tensor:
    """Picked frames uint8 (B, P, H, W, 3) to float (B, P, 3, H, W) in [0, 1]."""
    return torch.from_numpy(picked).permute(0, 1, 4, 2, 3).float() / 255


def loss_of(logits: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the heads' cross-entropies; what a shot does not show counts nothing."""
    total = F.binary_cross_entropy_with_logits(logits["present"], targets["present"]) * 4
    for head, answer in logits.items():
        if head == "present":
            continue
        target = targets[head].flatten()
        if (target != UNKNOWN).any():
            flat = answer.flatten(0, -2)
            total = total + F.cross_entropy(flat, target, ignore_index=UNKNOWN)
    return total


@torch.no_grad()
def answers(probe: Probe, frames: Sequence[np.ndarray], batch: int = 64) -> list[dict[str, object]]:
    """What a probe reads in each shot.

    Args:
        probe: the classifier.
        frames: shots, uint8 (F, H, W, 3) each.
        batch: shots at once.

    Returns:
        By shot: ``characters`` (frozenset), ``motion``, ``place``, ``time``, ``landmark``,
        ``vehicle``, ``scarf`` (of each character, were it there).
    """
    probe.eval()
    names = probe.names
    classes = {
        "motion": names.motions,
        "place": names.places,
        "time": names.times,
        "landmark": names.landmarks,
        "vehicle": names.vehicles,
    }
    found: list[dict[str, object]] = []
    for start in range(0, len(frames), batch):
        picked = np.stack([pick(np.asarray(shot)) for shot in frames[start : start + batch]])
        logits = probe(to_input(picked))
        best = {head: logits[head].argmax(-1).tolist() for head in classes}
        present, scarf = (logits["present"] > 0).tolist(), logits["scarf"].argmax(-1).tolist()
        for i in range(len(picked)):
            row: dict[str, object] = {head: classes[head][best[head][i]] for head in classes}
            pairs = zip(names.characters, present[i], strict=True)
            row["characters"] = frozenset(c for c, there in pairs if there)
            row["scarf"] = {
                c: names.scarves[k] for c, k in zip(names.characters, scarf[i], strict=True)
            }
            found.append(row)
    return found


def read_frames(
    probe: Probe, frames: Sequence[np.ndarray], edges: Sequence[float]
) -> list[Reading]:
    """What generated shots show: the probe's answers and the measured motion level.

    Args:
        probe: the classifier.
        frames: shots, uint8 (F, H, W, 3) each.
        edges: the world's stored borders between motion levels.
    """
    readings = []
    for row, shot in zip(answers(probe, frames), frames, strict=True):
        attributes = {f"scarf:{c}": color for c, color in row["scarf"].items()}
        attributes["landmark"] = row["landmark"]
        attributes["vehicle"] = row["vehicle"]
        readings.append(
            Reading(
                characters=row["characters"],
                motion=row["motion"],
                place=row["place"],
                time_of_day=row["time"],
                level=level_of(motion_scope(np.asarray(shot)), edges),
                attributes=attributes,
            )
        )
    return readings


def head_accuracy(readings: Sequence[Reading], shots: Sequence[Shot]) -> dict[str, float]:
    """Accuracy of each head on shots of which the truth is known, hidden attributes included."""
    hits: dict[str, list[bool]] = {}
    for given, shot in zip(readings, shots, strict=True):
        truth = read_truth(shot)
        hits.setdefault("character", []).append(given.characters == truth.characters)
        hits.setdefault("motion", []).append(given.motion == truth.motion)
        hits.setdefault("place", []).append(given.place == truth.place)
        hits.setdefault("time_of_day", []).append(given.time_of_day == truth.time_of_day)
        for attribute, value in truth.attributes.items():
            kind = attribute.partition(":")[0]
            hits.setdefault(kind, []).append(given.attributes[attribute] == value)
    return {head: float(np.mean(values)) for head, values in hits.items()}


def save_probe(directory: str | Path, probe: Probe, about: dict[str, object]) -> None:
    """Writes ``probe.json`` (readable, rebuilds the model) and ``probe.safetensors`` (float16)."""
    directory = Path(directory)
    weights = {
        name: value.half() if value.is_floating_point() else value
        for name, value in probe.state_dict().items()
    }
    write_bytes(directory / "probe.safetensors", save(weights))
    description = {"names": asdict(probe.names), "width": probe.width, "picks": PICKS, **about}
    text = json.dumps(description, indent=2, ensure_ascii=False)
    write_text(directory / "probe.json", text + "\n")


def has_probe(directory: str | Path) -> bool:
    """Whether a finished probe lies in a directory (its JSON is written last)."""
    return (Path(directory) / "probe.json").is_file()


def trained_with(directory: str | Path, made_of: dict[str, object]) -> bool:
    """Whether a saved probe says that it was made of this."""
    about = json.loads((Path(directory) / "probe.json").read_text(encoding="utf-8"))
    return bool(about.get("made_of") == made_of)


def load_probe(directory: str | Path) -> Probe:
    """Reads a saved probe, ready to judge.

    Raises:
        ProbeError: if there is none, or it was saved for other frames.
    """
    directory = Path(directory)
    if not has_probe(directory):
        raise ProbeError(
            f"no probe in {directory}: run scripts/prepare_evaluation.py, which trains one"
        )
    about = json.loads((directory / "probe.json").read_text(encoding="utf-8"))
    if about["picks"] != PICKS:
        raise ProbeError(f"{directory} looks at {about['picks']} frames, this code at {PICKS}")
    names = Vocabulary(**{key: tuple(value) for key, value in about["names"].items()})
    probe = Probe(names, about["width"])
    probe.load_state_dict(load_file(directory / "probe.safetensors"))
    return probe.eval()
