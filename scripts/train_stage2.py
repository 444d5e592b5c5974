"""Stage 2: next game state prediction (paper Sec. 3.2): the MLLM on games of cached features.

The encoder of stage 1 is frozen:

    python scripts/train_stage2.py --config configs/tiny/stage2.yaml
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
    parser.add_argument("--config", default="configs/tiny/stage2.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    import torch

    from animegamer import config as configuration
    from animegamer.checkpoint import exported, fingerprint, load_model
    from animegamer.features import FeatureStore
    from animegamer.game_data import GameDataset
    from animegamer.models.encoder import ActionAwareEncoder
    from animegamer.models.mllm import NextStateMLLM
    from animegamer.models.state_model import StateModel
    from animegamer.parallel import process_count
    from animegamer.records import read_episodes
    from animegamer.schedule import SampleSchedule
    from animegamer.training import fit
    from data_pipeline.features import feature_source

    config = configuration.load(options.config, options.overrides)
    train = config.train
    if train.init is None:
        raise configuration.ConfigError("stage 2 needs train.init: the run of stage 1")
    if train.first_frame_share:
        raise configuration.ConfigError("stage 2 sees no frames: set train.first_frame_share=0")
    weights = exported(train.init)
    encoder = load_model(ActionAwareEncoder, weights / "encoder")
    torch.manual_seed(train.seed)
    width = encoder.config.width
    base = weights / "mllm"
    if base.is_dir():  # a whole checkpoint: its MLLM trains on
        mllm = NextStateMLLM.from_pretrained(base, config=config.mllm)
    else:
        base = Path(config.backbones.language_base)
        mllm = NextStateMLLM.from_base(base, config.mllm, encoder.num_tokens, width)
    if config.mllm.gradient_checkpointing:
        mllm.mistral.gradient_checkpointing_enable({"use_reentrant": False})
    model = StateModel(encoder, mllm)
    source = feature_source(config.backbones)
    store = FeatureStore(config.data.features, source)

    def games(directory: str, seed: int, group: int) -> GameDataset:
        episodes = read_episodes(Path(directory) / "shots.jsonl")
        return GameDataset(episodes, store, mllm.language, config.data, seed, group=group)

    together = SampleSchedule(train, process_count()).samples(train.steps)
    data = games(config.data.train, train.seed, together)
    held_out = games(config.data.validation, 1, train.batch_size)

    def validate(step: int, directory: Path) -> dict[str, float]:
        sums: dict[str, float] = {}
        for number in range(train.validation_batches):
            part = held_out.batch(number * train.batch_size, train.batch_size)
            device = next(model.parameters()).device
            for name, value in model(part.to(device))[1].items():
                sums[name] = sums.get(name, 0.0) + float(value) / train.validation_batches
        return sums

    fit(
        config,
        model,
        data.batch,
        validate=validate,
        export=lambda directory: mllm.save_pretrained(directory / "mllm"),
        parents={
            **source,
            "init": fingerprint(weights / "encoder"),
            "base": fingerprint(base),
        },
    )


if __name__ == "__main__":
    main()
