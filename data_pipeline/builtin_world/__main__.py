"""Draws films of the built-in world.

python -m data_pipeline.builtin_world --out data/world/train --split train --games 4000
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_pipeline.builtin_world",
        description="Draws films of the built-in world: clips/*.mp4, shots.jsonl and world.json.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--split", choices=("train", "validation", "test"), default="train")
    parser.add_argument(
        "--kind",
        default="mixed",
        choices=("mixed", "standard", "skill", "long", "language"),
        help="mixed: 1-10 turns, for training; standard: 10 turns; skill: asks "
        "for skills a character never showed; long: 100 turns; language: the "
        "same game in English, Chinese and Japanese (default: %(default)s)",
    )
    parser.add_argument("--games", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--height", type=int, default=64, help="pixels (default: %(default)s)")
    parser.add_argument("--width", type=int, default=96, help="pixels (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: %(default)s)")
    return parser


def main() -> int:
    """Reads the command line and draws. Returns the exit status."""
    parser = _parser()
    options = parser.parse_args()
    if options.games < 1 or options.workers < 1:
        parser.error("--games and --workers must be at least 1")
    if options.height < 32 or options.width * 5 < options.height * 7:
        parser.error("frames must be at least 32 high, and 1.4 times as wide as high")
    from data_pipeline.builtin_world.dataset import Job, draw

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        path = draw(Job(**vars(options)))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    logging.info("wrote %s", path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
