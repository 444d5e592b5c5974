"""Finds the speeds of ``energy.json`` and the level edges of ``levels.json``.

Run after a change to drawing or motion: ``python -m data_pipeline.builtin_world.calibrate``.
Both files are committed, so that every split and every machine shares them.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from animegamer.atomic import write_text
from animegamer.motion import level_edges, level_of, motion_scope
from data_pipeline.builtin_world import energy
from data_pipeline.builtin_world.attributes import LANDMARKS, SCARVES, Attributes
from data_pipeline.builtin_world.looks import CHARACTERS
from data_pipeline.builtin_world.motions import INTENSITIES, MOTIONS, SOLO
from data_pipeline.builtin_world.places import PLACES, TIMES
from data_pipeline.builtin_world.renderer import SceneSpec, render

log = logging.getLogger(__name__)
LEVELS_FILE = Path(__file__).with_name("levels.json")


def random_scene(
    rng: random.Random,
    motion: str | None = None,
    intensity: int | None = None,
    place: str | None = None,
) -> SceneSpec:
    """A scene with everything not given drawn evenly."""
    motion = motion or rng.choice(MOTIONS)
    company = 1 if motion in SOLO or rng.random() < 0.6 else 2
    cast = tuple(rng.sample(CHARACTERS, company))
    scarf = rng.choice(list(SCARVES))
    attributes = Attributes({cast[0]: scarf}, scarf, rng.choice(LANDMARKS))
    return SceneSpec(
        cast,
        motion,
        intensity or rng.choice(INTENSITIES),
        place or rng.choice(PLACES),
        rng.choice(TIMES),
        rng.choice(("left", "right")),
        attributes,
    )


def calibrate_speeds(
    motions: Sequence[str] = MOTIONS, rounds: int = 3, samples: int = 8
) -> dict[str, list[float]]:
    """Adjusts every speed until the mean motion scope of its scenes meets the target."""
    table = {motion: [energy.camera_speed(motion, i) for i in INTENSITIES] for motion in MOTIONS}
    energy.override(table)
    for step in range(rounds):
        for motion in motions:
            speeds = table[motion]
            for index, intensity in enumerate(INTENSITIES):
                rng = random.Random(f"{motion} {intensity} {step % 2}")
                scopes = [
                    motion_scope(render(random_scene(rng, motion, intensity)))
                    for _ in range(samples)
                ]
                ratio = energy.TARGETS[index] / float(np.exp(np.mean(np.log(scopes))))
                speeds[index] = round(speeds[index] * min(max(ratio, 0.6), 1.6), 3)
        log.info("round %d of %d done", step + 1, rounds)
    return table


def main() -> None:
    """Writes both committed files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--levels-only", action="store_true", help="keep the speeds, measure the level edges again"
    )
    parser.add_argument(
        "--motions", nargs="+", choices=MOTIONS, default=MOTIONS, help="adjust only these"
    )
    parser.add_argument("--scenes", type=int, default=1500, help="sample size for the edges")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not options.levels_only:
        table = calibrate_speeds(options.motions)
        write_text(energy.TABLE_FILE, json.dumps(table, indent=1) + "\n")
    rng = random.Random(0)
    scenes = [random_scene(rng) for _ in range(options.scenes)]
    scopes = [motion_scope(render(scene)) for scene in scenes]
    edges = [round(edge, 4) for edge in level_edges(scopes)]
    right = np.mean(
        [
            level_of(scope, edges) == scene.intensity
            for scope, scene in zip(scopes, scenes, strict=True)
        ]
    )
    log.info("level edges %s; level equals intensity in %.1f %% of scenes", edges, 100 * right)
    write_text(LEVELS_FILE, json.dumps({"level_edges": edges, "scenes": options.scenes}) + "\n")


if __name__ == "__main__":
    main()
