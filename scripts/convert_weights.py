r"""Converts weights: the authors' files to a checkpoint of ours, back, and to stock libraries.

    python scripts/convert_weights.py from-release --output checkpoints/AnimeGamer \
        --mllm release/pytorch_model.bin --decoder release/mp_rank_00_model_states.pt \
        --autoencoder release/3d-vae.pt backbones.language_base=checkpoints/Mistral-7B-Instruct-v0.1
    python scripts/convert_weights.py to-release --checkpoint checkpoints/AnimeGamer --output back
    python scripts/convert_weights.py to-stock --checkpoint checkpoints/AnimeGamer --output stock

from-release keeps LoRA as adapters, so that it can be converted back; --merge folds it in for good.
What the files do not tell (tokenizer, head counts, LoRA alpha) comes from the configuration, whose
defaults are the release's. to-stock writes what diffusers and transformers load without our code.
Nothing is unpickled that could run code. Output directories must not exist.
"""

from __future__ import annotations

import argparse
import sys


def convert(options: argparse.Namespace) -> str:
    """Runs one conversion; returns its report."""
    from animegamer import config as configuration

    config = configuration.load(options.config, options.overrides)
    from animegamer.convert.release import ReleaseFiles, from_release, to_release
    from animegamer.convert.stock import to_stock

    if options.direction == "from-release":
        files = ReleaseFiles(options.mllm, options.decoder, options.autoencoder)
        return from_release(files, options.output, config, merge=options.merge)
    if options.checkpoint is None:
        raise ValueError(f"{options.direction} needs --checkpoint, the directory to convert")
    way = to_release if options.direction == "to-release" else to_stock
    return way(options.checkpoint, options.output)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("direction", choices=["from-release", "to-release", "to-stock"])
    parser.add_argument("--output", required=True, metavar="DIR", help="new directory")
    parser.add_argument("--mllm", metavar="FILE", help="pytorch_model.bin")
    parser.add_argument("--decoder", metavar="FILE", help="mp_rank_00_model_states.pt")
    parser.add_argument("--autoencoder", metavar="FILE", help="3d-vae.pt")
    parser.add_argument("--checkpoint", metavar="DIR", help="ours, for to-release and to-stock")
    parser.add_argument("--merge", action="store_true", help="fold LoRA in; there is no way back")
    parser.add_argument("--config", help="such as configs/full/play.yaml; default: the release's")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as decoder.lora.alpha=1"
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        report = convert(options)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"convert_weights.py: {error}", file=sys.stderr)
        return 2
    print(f"{report}\n\nwrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
