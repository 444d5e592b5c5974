"""Gathers the public checkpoint from training runs: float16, with all that playing needs.

Encoder from stage 1, MLLM from stage 2, decoder from stage 3, the backbones of
``assemble.backbones``, ``config.yaml`` and the vocabulary. What else lies in the directory
stays. The old checkpoint is replaced as a whole, or not at all.

    python scripts/assemble_checkpoint.py --config configs/tiny/assemble.yaml
    python scripts/assemble_checkpoint.py assemble.decoder=runs/tiny/stage1_decoder   before stage 3
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from animegamer.config import Config


def assemble(config: Config) -> str:
    """Writes the checkpoint to ``assemble.output``; returns a table of its parts."""
    from animegamer.assembly import size_table, write_parts
    from animegamer.checkpoint import replace_directory
    from animegamer.curves import draw_curves
    from data_pipeline.builtin_world.vocabulary import vocabulary
    from data_pipeline.features import feature_source

    settings, tables = config.assemble, []
    output = Path(settings.output)

    def write(temporary: Path) -> None:
        if output.is_dir():
            shutil.copytree(output, temporary, dirs_exist_ok=True)
        names = vocabulary() if settings.vocabulary else None
        parts = write_parts(config, temporary, feature_source(config.backbones), names)
        if settings.curves:
            draw_curves(settings.curves, temporary / "learning_curves.png")
        tables.append(size_table(temporary, parts, settings.largest, settings.largest_file))

    replace_directory(output, write)
    return tables[0]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/tiny/assemble.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as assemble.output=checkpoints/mine"
    )
    options = parser.parse_intermixed_args(arguments)
    from animegamer import config as configuration

    try:
        config = configuration.load(options.config, options.overrides)
        print(assemble(config))
    except (OSError, ValueError, RuntimeError) as error:
        print(f"assemble_checkpoint.py: {error}", file=sys.stderr)
        return 2
    print(f"\nwrote {config.assemble.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
