"""Measures a decoder by itself, on the true representation of held-out shots.

    python scripts/evaluate_decoder.py play.checkpoint=runs/tiny/stage1_joint
    python scripts/evaluate_decoder.py play.checkpoint=runs/no_motion_scope   ablation "w/o f_ms"

Takes a checkpoint directory or a training run (its newest export). Writes ``decoder.json`` and
``decoder_sheet.png`` to ``evaluate.output``. Games and probes as in ``scripts/evaluate.py``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from animegamer.config import Config
    from animegamer.drawing import ShotDrawer, ShotReader


def load(config: Config) -> tuple[ShotDrawer, ShotReader]:
    """Decoder and encoder of a checkpoint or a run."""
    from safetensors.torch import load_file

    from animegamer.checkpoint import exported, load_model
    from animegamer.drawing import ShotDrawer, ShotReader
    from animegamer.models.backbones import (
        load_autoencoder,
        load_image_encoder,
        load_text_encoder,
    )
    from animegamer.models.decoder_files import load_decoder
    from animegamer.models.encoder import ActionAwareEncoder

    parts, device = exported(config.play.checkpoint), config.play.device
    encoder = load_model(ActionAwareEncoder, parts / "encoder").eval().to(device)
    decoder = load_decoder(parts / "decoder").eval().to(device)
    stored = parts / "decoder" / "null.safetensors"
    null = load_file(stored)["s_a_null"] if stored.is_file() else encoder.null()
    backbones = config.backbones
    drawer = ShotDrawer(config, decoder, load_autoencoder(backbones).to(device), null)
    image, text = load_image_encoder(backbones), load_text_encoder(backbones)
    return drawer, ShotReader(config, encoder, image.to(device), text.to(device))


def evaluate(config: Config, command: list[str]) -> None:
    """Draws the held-out games if need be, redraws them with the decoder, and reports."""
    import torch

    from animegamer.drawing import with_checkpoint
    from animegamer.evaluation import report
    from animegamer.evaluation.contact_sheet import contact_sheet
    from animegamer.evaluation.decoder_only import judge_redrawn, redraw
    from animegamer.evaluation.games import game_sets
    from animegamer.evaluation.probes import load_probe
    from animegamer.evaluation.truth import World

    script = Path(__file__).with_name("prepare_evaluation.py")
    subprocess.run([sys.executable, str(script), *command], check=True)
    config = with_checkpoint(config)
    only = replace(config.evaluate, window_games=0, skill_games=0, language_games=0, long_games=0)
    games = game_sets(only)["standard"]
    if config.play.threads:
        torch.set_num_threads(config.play.threads)
    shots = games.shots()
    drawn, generated = redraw(*load(config), games.directory, shots, config.play.seed)
    figures, outcomes = judge_redrawn(
        load_probe(only.probes),
        World.read(games.directory).edges,
        shots,
        drawn,
        generated,
        only.bootstrap,
    )
    output = Path(only.output)
    print(report.table(figures))
    report.write_metrics(output / "decoder.json", figures, {"checkpoint": config.play.checkpoint})
    contact_sheet(
        drawn, generated, [report.caption(o) for o in outcomes], output / "decoder_sheet.png"
    )
    print(f"\nwrote {output}/decoder.json and decoder_sheet.png")


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
        help="such as evaluate.count=10 or sampling.steps=20",
    )
    options = parser.parse_intermixed_args(arguments)
    from animegamer import config as configuration

    try:
        evaluate(
            configuration.load(options.config, options.overrides),
            ["--config", options.config, *options.overrides],
        )
    except (OSError, ValueError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"evaluate_decoder.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
