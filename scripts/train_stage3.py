"""Stage 3: decoder adaptation (paper Sec. 3.2): the decoder on cached MLLM predictions.

The MLLM is never loaded; run ``scripts/predict_states.py`` first.

    python scripts/train_stage3.py --config configs/tiny/stage3.yaml
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
    parser.add_argument("--config", default="configs/tiny/stage3.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    import json

    import torch
    from safetensors.torch import load_file

    from animegamer import config as configuration
    from animegamer.checkpoint import CheckpointError, exported, fingerprint, load_model
    from animegamer.data import ShotDataset
    from animegamer.features import FeatureError, FeatureStore
    from animegamer.models.backbones import load_autoencoder
    from animegamer.models.decoder_files import load_decoder, save_decoder
    from animegamer.models.encoder import ActionAwareEncoder
    from animegamer.models.shot_model import ShotModel
    from animegamer.records import read_shots
    from animegamer.training import fit
    from animegamer.validation import ShotValidation
    from data_pipeline.features import feature_source

    config = configuration.load(options.config, options.overrides)
    train = config.train
    if train.init is None:
        raise configuration.ConfigError("stage 3 needs train.init: the run of stage 1")
    weights = exported(train.init)
    source = feature_source(config.backbones)
    store = FeatureStore(config.data.features, source)
    predictions = FeatureStore(config.data.predictions)
    stored = Path(config.data.predictions) / "null.safetensors"
    if not stored.is_file():  # written last
        raise FeatureError(f"no {stored}: run scripts/predict_states.py to its end")
    null = load_file(stored)["s_a_null"]
    encoder = load_model(ActionAwareEncoder, weights / "encoder")
    if null.shape != encoder.null().shape or not torch.allclose(null, encoder.null(), atol=1e-3):
        raise CheckpointError(
            f"{config.data.predictions} was made with another encoder than {weights / 'encoder'}: "
            "run scripts/predict_states.py again with this configuration"
        )

    def shots(directory: str, **dropout: float) -> ShotDataset:
        records = read_shots(Path(directory) / "shots.jsonl")
        return ShotDataset(records, store, train.seed, predictions=predictions, **dropout)

    data = shots(
        config.data.train, text_dropout=train.text_dropout, image_dropout=train.image_dropout
    )
    held_out = shots(config.data.validation)
    torch.manual_seed(train.seed)
    decoder = load_decoder(weights / "decoder")
    if config.decoder.gradient_checkpointing:
        decoder.enable_gradient_checkpointing()
    model = ShotModel(None, decoder, config.diffusion, s_a_null=null)
    world = json.loads((Path(config.data.train) / "world.json").read_text(encoding="utf-8"))
    autoencoder = load_autoencoder(config.backbones)
    validation = ShotValidation(config, held_out, autoencoder, world["level_edges"], null)
    fit(
        config,
        model,
        data.batch,
        validate=lambda step, directory: validation(model, step, directory),
        export=lambda directory: save_decoder(decoder, directory / "decoder"),
        parents={**source, **predictions.source, "init": fingerprint(weights / "decoder")},
    )


if __name__ == "__main__":
    main()
