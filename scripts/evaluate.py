"""Plays held-out games of the built-in world, judges what came, and prints one table.

    python scripts/evaluate.py --config configs/tiny/evaluate.yaml
    python scripts/evaluate.py evaluate.count=3 evaluate.window_games=3 evaluate.skill_games=0 \
        evaluate.language_games=0 evaluate.long_games=0          a quick look

The games are drawn and the probes trained on first use. Played sets are kept in
``evaluate.output`` and used again while checkpoint, settings and games stay the same, so an
interrupted run goes on where it was. Writes ``metrics.json``, ``report.txt``, ``report.png`` and
``contact_sheet.png`` there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from animegamer.config import Config


def evaluate(config: Config, command: list[str]) -> None:
    """Draws, plays, judges and reports.

    Args:
        config: the configuration.
        command: the command line's arguments, for the preparation.
    """
    from animegamer.drawing import with_checkpoint
    from animegamer.evaluation import benchmark, report
    from animegamer.evaluation.contact_sheet import contact_sheet
    from animegamer.evaluation.evaluator import Evaluator, weights
    from animegamer.evaluation.games import game_sets
    from animegamer.evaluation.play import seconds_alone
    from animegamer.evaluation.probes import load_probe
    from animegamer.evaluation.truth import World
    from animegamer.session import GameSession
    from animegamer.video import read_video

    config = with_checkpoint(config)
    output, resamples = Path(config.evaluate.output), config.evaluate.bootstrap
    script = Path(__file__).with_name("prepare_evaluation.py")
    subprocess.run([sys.executable, str(script), *command], check=True)
    sets = game_sets(config.evaluate)
    world = World.read(next(iter(sets.values())).directory)
    session = GameSession.load(config)
    evaluator = Evaluator(
        config,
        session,
        load_probe(config.evaluate.probes),
        world.edges,
        weights(config.play.checkpoint),
    )
    results, played = {}, {}
    for name, games in sets.items():
        results[name], played[name] = evaluator.evaluate(games)
    figures = benchmark.figures(results, world, config.play.window, resamples)
    text = report.table(figures)
    seconds = {
        "side_by_side": next(iter(played.values())).seconds,
        "alone": seconds_alone(session, next(iter(sets.values()))),
    }
    more = {
        "seconds_per_turn": seconds,
        "probes": evaluator.accuracy,
        "checkpoint": evaluator.checkpoint,
        "window": config.play.window,
        "sink": config.play.sink,
        "games": {n: len(g.episodes) for n, g in sets.items()},
    }
    standard = results.get("standard")
    if standard is not None:
        more["levels"] = levels = benchmark.levels_table(standard, resamples)
        more["hidden_attributes_by_kind"] = benchmark.attributes(
            standard, config.play.window, resamples
        )
        text += "\n\n" + report.levels_text(levels)
        text += "\n\n" + report.probes_table(evaluator.accuracy)
    text += "\n\nseconds a turn: " + ", ".join(f"{v:.2f} {k}" for k, v in seconds.items())
    print(text)
    report.write_metrics(output / "metrics.json", figures, more)
    report.write_text(output / "report.txt", text + "\n")
    if standard is not None:
        drawn = [read_video(standard.games.directory / s.clip) for s in standard.games.shots()]
        frames = played["standard"].frames
        report.draw_report(output / "report.png", figures, standard, levels, drawn, frames)
        contact_sheet(
            drawn, frames, [report.caption(o) for o in standard.given], output / "contact_sheet.png"
        )
    print(f"\nwrote {output}/metrics.json, report.txt, report.png and contact_sheet.png")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/tiny/evaluate.yaml")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="such as evaluate.count=3 or play.checkpoint=runs/mine",
    )
    options = parser.parse_intermixed_args(arguments)
    from animegamer import config as configuration

    try:
        evaluate(
            configuration.load(options.config, options.overrides),
            ["--config", options.config, *options.overrides],
        )
    except (OSError, ValueError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
