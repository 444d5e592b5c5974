"""Trains the tiny text-to-video CogVideoX, which stands where CogVideoX-2B's weights do.

Whole instruction texts are its captions:

    python scripts/train_video_base.py --config configs/tiny/video_base.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> Any:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/tiny/video_base.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    from dataclasses import replace

    import torch

    from animegamer import config as configuration
    from animegamer.checkpoint import exported, load_model, replace_directory
    from animegamer.features import FeatureStore
    from animegamer.models.backbones import load_text_encoder
    from animegamer.parallel import is_main
    from animegamer.pretraining import video_base
    from animegamer.records import read_shots
    from animegamer.training import fit
    from data_pipeline.features import feature_source

    config = configuration.load(options.config, options.overrides)
    source = feature_source(config.backbones)
    store = FeatureStore(config.data.features, source)
    shots = read_shots(Path(config.data.train) / "shots.jsonl")
    captions = replace(config.backbones, text_tokens=config.pretrain.video_base.text_tokens)
    encoder = load_text_encoder(captions)
    data = video_base.CaptionDataset(shots, store, encoder, config.train.seed)
    torch.manual_seed(config.train.seed)
    shape = store[data.shots[0].shot_id]["latents"].shape
    transformer = video_base.build(config, data.states.shape[-1], shape)
    model = video_base.TextToVideoLoss(transformer, config.diffusion)
    finished = fit(
        config,
        model,
        data.batch,
        export=lambda directory: transformer.save_pretrained(directory / "transformer"),
        parents=source,
    )
    if finished and is_main():
        weights = exported(config.train.run) / "transformer"
        trained = load_model(type(transformer), weights).half()
        replace_directory(config.backbones.video_base, trained.save_pretrained)


if __name__ == "__main__":
    main()
