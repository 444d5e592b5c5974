"""Draws the held-out games, and trains the probes that judge generated shots.

    python scripts/prepare_evaluation.py --config configs/tiny/evaluate.yaml

``evaluate.py`` and ``evaluate_decoder.py`` call it by themselves. The probes train on
``evaluate.probe_games`` further games, as they were drawn, for some minutes on one core; what is
there already stays, unless its settings have changed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from animegamer.config import Config

# The held-out games: the same for everyone, and no other data set has these seeds.
TEST_SEED, PROBE_SEED = 4014, 7041
# Skill games show every character flying and driving; mostly even games keep the motions even.
SKILL_SHARE = 0.15


def draw_games(config: Config, parent: Path, wanted: dict[str, int], seed: int) -> list[Path]:
    """Draws games that are not there yet, a folder a kind; returns the folders."""
    from data_pipeline.builtin_world.dataset import Job, draw

    height, width, workers = config.shot.height, config.shot.width, config.data.workers
    for kind, games in wanted.items():
        draw(Job(parent / kind, "test", games, seed, kind, height, width, workers))
    return [parent / kind for kind in wanted]


def train(config: Config) -> None:
    """Trains and saves the probes, if they are not there yet."""
    import torch

    from animegamer.evaluation.probe_training import ProbeSettings, load_shots, train_probe
    from animegamer.evaluation.probes import has_probe, save_probe, trained_with

    evaluate = config.evaluate
    made_of = {
        "games": evaluate.probe_games,
        "steps": evaluate.probe_steps,
        "height": config.shot.height,
        "width": config.shot.width,
    }
    if has_probe(evaluate.probes) and trained_with(evaluate.probes, made_of):
        print(f"{evaluate.probes} holds a probe trained with these settings")
        return
    if config.play.threads:
        torch.set_num_threads(config.play.threads)
    skilled = round(SKILL_SHARE * evaluate.probe_games)
    wanted = {"standard": evaluate.probe_games - skilled, "skill": skilled}
    folders = draw_games(config, Path(evaluate.probes) / "shots", wanted, PROBE_SEED)
    frames, shots = load_shots(folders)
    probe, about = train_probe(frames, shots, ProbeSettings(steps=evaluate.probe_steps))
    save_probe(evaluate.probes, probe, {"made_of": made_of, **about})
    print(f"wrote {evaluate.probes}/probe.safetensors: {about}")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/tiny/evaluate.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as evaluate.probe_steps=300"
    )
    options = parser.parse_intermixed_args(arguments)
    from animegamer import config as configuration

    try:
        config = configuration.load(options.config, options.overrides)
        from animegamer.evaluation.games import games_wanted

        wanted = games_wanted(config.evaluate)
        draw_games(config, Path(config.evaluate.games), wanted, TEST_SEED)
        train(config)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"prepare_evaluation.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
