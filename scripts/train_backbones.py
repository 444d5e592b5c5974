"""Trains the tiny backbones that take the place of downloaded weights.

In order: ``text`` (sentencepiece vocabulary, T5, Mistral), ``image_encoder`` (CLIP),
``autoencoder``. The text-to-video base needs the features that these make:
``scripts/train_video_base.py``. Interrupt and run again at will.

    python scripts/train_backbones.py --config configs/tiny/backbones.yaml
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from animegamer.config import Config, PretrainSchedule


def schedule(config: Config, name: str, part: PretrainSchedule) -> Config:
    """The configuration of one backbone's run."""
    train = replace(
        config.train,
        run=f"{config.train.run}/{name}",
        trainable=("model",),
        steps=part.steps,
        batch_size=part.batch_size,
        lr=part.lr,
        schedule="cosine",
        validate_every=0,
    )
    return replace(config, train=train)


def train_to_end(run: Config, model: Any, data: Any) -> None:
    """Trains a backbone; if it is stopped, ends the script before the next one or an export."""
    from animegamer.training import fit

    if not fit(run, model, data):
        print("stopped; the same command goes on from here")
        sys.exit(0)


def load_clips(config: Config, directory: str, count: int) -> np.ndarray:
    """Pixels of the first clips of a split, (n, F, H, W, 3) uint8."""
    import numpy as np
    from tqdm import tqdm

    from animegamer.records import read_shots
    from animegamer.video import read_video

    shots = [s for s in read_shots(Path(directory) / "shots.jsonl") if s.turn > 0][:count]
    clips = [
        read_video(Path(directory) / shot.clip, config.shot.frames)
        for shot in tqdm(shots, desc="read clips", unit="clip")
    ]
    return np.stack(clips)


def train_text(config: Config) -> None:
    """Vocabularies, T5 encoder, Mistral base."""
    import torch
    from transformers import T5EncoderModel

    from animegamer import language
    from animegamer.checkpoint import replace_directory
    from animegamer.pretraining import text
    from animegamer.records import read_shots

    sizes, paths = config.pretrain, config.backbones
    shots = read_shots(Path(config.data.train) / "shots.jsonl")
    lines = [str(shot.instruction) for shot in shots if shot.instruction is not None]
    actions = sorted({shot.action for shot in shots if shot.action})
    work = Path(config.train.run) / "vocabulary"
    text.train_vocabulary(
        lines + actions, sizes.text_encoder.vocabulary, work / "t5/spiece.model", llama=False
    )
    tokenizer = text.save_t5_tokenizer(work / "t5/spiece.model", work / "t5_tokenizer")
    pieces = len(tokenizer) - text.SENTINELS
    ids = [tokenizer(t, add_special_tokens=False).input_ids for t in lines + actions * 20]
    run = schedule(config, "t5", sizes.text_encoder.train)
    torch.manual_seed(run.train.seed)
    t5 = text.build_t5(sizes.text_encoder, pieces)
    data = text.Corrupted(ids, pieces, run.train.seed)
    train_to_end(run, text.TextLoss(t5), data)

    def write_t5(directory: Path) -> None:
        encoder = T5EncoderModel(t5.config)
        encoder.load_state_dict(t5.state_dict(), strict=False)
        encoder.half().save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    replace_directory(paths.text_encoder, write_t5)
    text.train_vocabulary(
        lines, sizes.text_encoder.vocabulary, work / "mistral/tokenizer.model", llama=True
    )
    # With the special tokens: embeddings of their own, where a base that grows gives its mean.
    frames = 1 << (paths.text_tokens + paths.visual_tokens - 1).bit_length()
    pieces = work / "mistral/tokenizer.model"
    language.save_tokenizer(pieces, work / "mistral_tokenizer", frames)
    tokenizer = language.load_tokenizer(work / "mistral_tokenizer")
    told: dict[str, list[list[int]]] = {}
    for shot in shots:
        if shot.instruction is not None:
            line = tokenizer(str(shot.instruction), add_special_tokens=False).input_ids
            told.setdefault(shot.episode, []).append(line)
    ids = text.documents(list(told.values()))
    run = schedule(config, "mistral", sizes.language_base.train)
    torch.manual_seed(run.train.seed)
    mistral = text.build_mistral(sizes.language_base, len(tokenizer), tokenizer.vocab_size)
    train_to_end(run, text.TextLoss(mistral), text.Lines(ids, run.train.seed))

    def write_mistral(directory: Path) -> None:
        mistral.half().save_pretrained(directory)
        language.save_tokenizer(pieces, directory, frames)

    replace_directory(paths.language_base, write_mistral)


def train_image_encoder(config: Config, clips: np.ndarray) -> None:
    """The CLIP tower."""
    import torch
    from transformers import AutoTokenizer

    from animegamer.checkpoint import replace_directory
    from animegamer.pretraining import image_encoder
    from animegamer.records import read_shots

    sizes, paths = config.pretrain.image_encoder, config.backbones
    run = schedule(config, "image_encoder", sizes.train)
    shots = read_shots(Path(config.data.train) / "shots.jsonl")
    texts = [str(shot.instruction) for shot in shots if shot.turn > 0][: len(clips)]
    tokenizer = AutoTokenizer.from_pretrained(paths.text_encoder)
    tokens = image_encoder.tokenize(tokenizer, texts, sizes.text_length)
    torch.manual_seed(run.train.seed)
    model = image_encoder.build(sizes, paths, len(tokenizer))
    data = image_encoder.CaptionedFrames(clips, tokens, paths, run.train.seed)
    first = image_encoder.CaptionedFrames(clips, tokens, paths, 1)(0, min(512, len(clips)))
    image_encoder.start_from_components(model, first.pixels)
    train_to_end(run, image_encoder.ContrastiveLoss(model), data)
    settings = image_encoder.model_config(sizes, paths, len(tokenizer))
    replace_directory(
        paths.image_encoder, lambda directory: image_encoder.save(model, settings, directory)
    )


def train_autoencoder(config: Config, clips: np.ndarray, decoder_alone: bool) -> None:
    """The video autoencoder, or more of its decoder with the latents left as they are."""
    import torch

    from animegamer.checkpoint import load_model, replace_directory
    from animegamer.models.patch_autoencoder import PatchAutoencoder
    from animegamer.pretraining import autoencoder

    sizes, trainable = config.pretrain.autoencoder, ("model",)
    held_out = load_clips(config, config.data.validation, 200)
    torch.manual_seed(config.train.seed)
    if decoder_alone:
        run = schedule(config, "autoencoder_decoder", sizes.decoder_train)
        trainable = ("model.decoder", "model.pixel_net")
        model = load_model(PatchAutoencoder, config.backbones.autoencoder).float()
    else:
        run = schedule(config, "autoencoder", sizes.train)
        model = autoencoder.build(sizes, clips)
    run = replace(run, train=replace(run.train, trainable=trainable))
    before = autoencoder.psnr(model, held_out)
    print(f"before training: {before:.2f} dB on held-out clips")
    data = autoencoder.Pixels(clips, run.train.seed)
    train_to_end(run, autoencoder.AutoencoderLoss(model), data)
    print(f"after training: {autoencoder.psnr(model.eval(), held_out):.2f} dB on held-out clips")
    replace_directory(config.backbones.autoencoder, lambda d: model.half().save_pretrained(d))


def main(arguments: list[str] | None = None) -> Any:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/tiny/backbones.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    from animegamer.config import ConfigError, load
    from animegamer.parallel import process_count

    config = load(options.config, options.overrides)
    if process_count() > 1:
        raise ConfigError("the tiny backbones train in one process: start it without torchrun")
    parts = config.pretrain.parts
    if "text" in parts:
        train_text(config)
    if set(parts) - {"text"}:
        clips = load_clips(config, config.data.train, config.pretrain.clips)
        if "image_encoder" in parts:
            train_image_encoder(config, clips)
        if "autoencoder" in parts:
            train_autoencoder(config, clips, decoder_alone=False)
        if "autoencoder_decoder" in parts:
            train_autoencoder(config, clips, decoder_alone=True)


if __name__ == "__main__":
    main()
