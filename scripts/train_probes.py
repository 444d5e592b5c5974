"""Trains the probes that judge generated shots, on drawn shots only.

    python scripts/train_probes.py --config configs/tiny/evaluate.yaml

Draws ``evaluate.probe_games`` games of the built-in world (no game of them is a held-out one),
trains for some minutes on one core and writes ``probe.safetensors`` and ``probe.json`` to
``evaluate.probes``. A probe that is there already stays, unless its settings have changed.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from animegamer.config import Config

PROBE_SEED = 7041
# Skill games show every character flying and driving; mostly even games keep the motions even.
SKILL_SHARE = 0.15


def draw_games(config: Config) -> list[Any]:
    """Draws what the probes train on; returns the directories."""
    from pathlib import Path

    from data_pipeline.builtin_world.dataset import Job, draw

    evaluate, directories = config.evaluate, []
    skilled = round(SKILL_SHARE * evaluate.probe_games)
    for kind, games in (("standard", evaluate.probe_games - skilled), ("skill", skilled)):
        if games > 0:
            out = Path(evaluate.probes) / "shots" / kind
            draw(Job(out, "test", games, PROBE_SEED, kind, config.shot.height,
                     config.shot.width, config.data.workers))
            directories.append(out)
    return directories


def train(config: Config) -> None:
    """Draws, trains and saves."""
    from pathlib import Path

    import torch

    from animegamer.drawing import with_checkpoint
    from animegamer.evaluation.probe_training import ProbeSettings, load_shots, train_probe
    from animegamer.evaluation.probes import has_probe, save_probe, trained_with

    evaluate = config.evaluate
    if Path(config.play.checkpoint).is_dir():
        config = with_checkpoint(config)
    made_of = {"games": evaluate.probe_games, "steps": evaluate.probe_steps,
               "height": config.shot.height, "width": config.shot.width}
    if has_probe(evaluate.probes) and trained_with(evaluate.probes, made_of):
        print(f"{evaluate.probes} holds a probe trained with these settings")
        return
    if config.play.threads:
        torch.set_num_threads(config.play.threads)
    frames, shots = load_shots(draw_games(config))
    probe, about = train_probe(frames, shots, ProbeSettings(steps=evaluate.probe_steps))
    save_probe(evaluate.probes, probe, {"made_of": made_of, **about})
    print(f"wrote {evaluate.probes}/probe.safetensors: {about}")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/tiny/evaluate.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value",
                        help="such as evaluate.probe_steps=300")
    options = parser.parse_intermixed_args(arguments)
    from animegamer import config as configuration

    try:
        train(configuration.load(options.config, options.overrides))
    except (OSError, ValueError, RuntimeError) as error:
        print(f"train_probes.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
