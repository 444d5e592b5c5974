"""Stage 1: animation shot tokenization and de-tokenization (paper Sec. 3.2, C.1).

Warm-up trains the encoder into the video base, joint training both:

    python scripts/train_stage1.py --config configs/tiny/stage1_warmup.yaml
    python scripts/train_stage1.py --config configs/tiny/stage1_joint.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from animegamer.config import Config
    from animegamer.data import ShotDataset
    from animegamer.models.shot_model import ShotModel


def build_model(config: Config, data: ShotDataset) -> ShotModel:
    """Encoder and decoder, from ``train.init`` or from the video base."""
    import torch

    from animegamer.checkpoint import exported, load_model
    from animegamer.features import read_empty_text
    from animegamer.models.decoder_files import add_lora, load_decoder
    from animegamer.models.encoder import ActionAwareEncoder
    from animegamer.models.shot_model import ShotModel, new_encoder

    torch.manual_seed(config.train.seed)
    if config.train.init is not None:
        weights = exported(config.train.init)
        encoder = load_model(ActionAwareEncoder, weights / "encoder")
        decoder = load_decoder(weights / "decoder")
    else:
        features = data.features[data.shots[0].shot_id]
        encoder, decoder = new_encoder(config, features["f_v"].shape, features["f_md"].shape)
        if config.decoder.lora.rank:
            add_lora(decoder, config.decoder.lora, config.backbones.video_base)
    if config.decoder.gradient_checkpointing:
        decoder.enable_gradient_checkpointing()
    null_features = torch.from_numpy(read_empty_text(config.data.features))
    return ShotModel(encoder, decoder, config.diffusion, null_features)


def main(arguments: list[str] | None = None) -> Any:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/tiny/stage1_joint.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    import json

    from animegamer import config as configuration
    from animegamer.checkpoint import exported, fingerprint
    from animegamer.data import ShotDataset
    from animegamer.features import FeatureStore
    from animegamer.models.backbones import load_autoencoder
    from animegamer.models.decoder_files import save_decoder
    from animegamer.records import read_shots
    from animegamer.training import fit
    from animegamer.validation import ShotValidation
    from data_pipeline.features import feature_source

    config = configuration.load(options.config, options.overrides)
    train = config.train
    source = feature_source(config.backbones)
    store = FeatureStore(config.data.features, source)
    random_frame = config.data.reference_frame == "random"
    data = ShotDataset(
        read_shots(Path(config.data.train) / "shots.jsonl"),
        store,
        train.seed,
        text_dropout=train.text_dropout,
        image_dropout=train.image_dropout,
        random_frame=random_frame,
    )
    model = build_model(config, data)
    held_out = ShotDataset(
        read_shots(Path(config.data.validation) / "shots.jsonl"),
        store,
        train.seed,
        random_frame=random_frame,
    )
    world = json.loads((Path(config.data.train) / "world.json").read_text(encoding="utf-8"))
    autoencoder = load_autoencoder(config.backbones)
    validation = ShotValidation(config, held_out, autoencoder, world["level_edges"])

    def export(directory: Path) -> None:
        model.encoder.save_pretrained(directory / "encoder")
        save_decoder(model.decoder, directory / "decoder")

    parents = dict(source)
    if train.init is not None:
        parents["init"] = fingerprint(exported(train.init))
    else:
        parents["base"] = fingerprint(config.backbones.video_base)
    fit(
        config,
        model,
        data.batch,
        validate=lambda step, directory: validation(model, step, directory),
        export=export,
        parents=parents,
    )


if __name__ == "__main__":
    main()
