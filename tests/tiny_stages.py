"""What a user runs, at toy size: world, backbones, features, all stages, through the scripts."""

from __future__ import annotations

import importlib
from pathlib import Path

from data_pipeline.builtin_world.dataset import Job, draw
from tests.tiny_checkpoint import BACKBONES

ROOT = Path(__file__).parents[1]
HEIGHT, WIDTH = 32, 64


def paths(work: Path, backbones: Path) -> list[str]:
    """Where data and runs lie below ``work``, and the backbones."""
    return [
        *(f"backbones.{name}={backbones / name}" for name in BACKBONES),
        *(f"data.{name}={work}/data/{name}" for name in ("train", "validation")),
        *(f"data.{name}={work}/data/{name}" for name in ("features", "predictions")),
        f"data.mllm={work}/runs/stage2",
    ]


def overrides(work: Path) -> list[str]:
    """Sizes of a few thousand parameters, and everything below ``work``."""
    sizes = {
        "shot.height": HEIGHT,
        "shot.width": WIDTH,
        "backbones.image_height": HEIGHT,
        "backbones.image_width": WIDTH,
        "backbones.visual_tokens": 8,
        "decoder.motion_scope_hidden": 8,
        "sampling.steps": 2,
        "sampling.batch_size": 2,
        "data.workers": 1,
        "train.threads": 1,
        "train.log_every": 1,
    }
    return [
        *paths(work, work / "backbones"),
        *(f"{key}={value}" for key, value in sizes.items()),
    ]


PRETRAIN = [
    "pretrain.clips=8",
    "pretrain.autoencoder={latent_channels: 8, encoder_width: 8, encoder_blocks: 1, "
    "decoder_width: 8, decoder_blocks: 1, pixel_widths: [4, 4], pixel_blocks: [1, 1], "
    "train: {steps: 2, batch_size: 2}, decoder_train: {steps: 2, batch_size: 2}}",
    "pretrain.image_encoder={width: 24, layers: 2, head_width: 12, embed_dim: 8, text_width: 48, "
    "text_layers: 1, train: {steps: 2, batch_size: 4}}",
    "pretrain.text_encoder={vocabulary: 420, width: 16, layers: 1, heads: 2, feed_forward: 16, "
    "train: {steps: 3, batch_size: 4}}",
    "pretrain.language_base={width: 24, layers: 1, heads: 2, key_value_heads: 1, feed_forward: 24, "
    "train: {steps: 3, batch_size: 4}}",
]
VIDEO_BASE = "pretrain.video_base={heads: 2, head_width: 16, layers: 2, time_embed: 8}"
SHORT = [
    "train.steps=2",
    "train.batch_size=2",
    "train.first_frame_batch=2",
    "train.warmup_steps=1",
    "train.save_every=2",
    "train.samples=2",
    "train.validation_batches=1",
]


def run(script: str, config: str, work: Path, *more: str) -> Path:
    """Calls a script's ``main`` as its command line does; returns the run directory."""
    module = importlib.import_module(script)
    directory = work / "runs" / config
    module.main(
        [
            "--config",
            str(ROOT / "configs" / "tiny" / f"{config}.yaml"),
            f"train.run={directory}",
            *overrides(work),
            *more,
        ]
    )
    return directory


def draw_world(work: Path) -> None:
    """Four games to train on and two to validate with."""
    for split, games in (("train", 4), ("validation", 2)):
        draw(Job(work / "data" / split, split, games, height=HEIGHT, width=WIDTH))


def run_all(work: Path) -> None:
    """The whole pipeline, a few steps of each."""
    draw_world(work)
    run("scripts.train_backbones", "backbones", work, *PRETRAIN, "train.warmup_steps=1")
    run("data_pipeline.features", "features", work)
    run("scripts.train_video_base", "video_base", work, *SHORT, VIDEO_BASE)
    run("scripts.train_stage1", "stage1_warmup", work, *SHORT)
    stage1 = f"train.init={work / 'runs' / 'stage1_warmup'}"
    run("scripts.train_stage1", "stage1_joint", work, *SHORT, stage1, "train.validate_every=2")
    init = f"train.init={work / 'runs' / 'stage1_joint'}"
    run("scripts.train_stage2", "stage2", work, *SHORT, init, "train.validate_every=2")
    run("scripts.predict_states", "stage3", work, init)
    own = f"data.predictions={work / 'data' / 'own'}"
    run("scripts.predict_states", "stage3", work, init, own, "data.prediction_history=own")
    run("scripts.train_stage3", "stage3", work, *SHORT, init, own, "train.validate_every=2")
