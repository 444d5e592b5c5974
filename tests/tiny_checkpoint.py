"""A whole checkpoint of tiny random networks, as ``play.checkpoint`` wants it, in two seconds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import CogVideoXTransformer3DModel
from safetensors.torch import save_file
from transformers import MistralConfig, MistralForCausalLM, T5EncoderModel

from animegamer import config as configuration
from animegamer.config import (
    BackbonesConfig,
    Config,
    ImageEncoderSizes,
    LoraConfig,
    MllmConfig,
    PlayConfig,
    SamplingConfig,
    ShotConfig,
    TextEncoderSizes,
)
from animegamer.language import save_tokenizer
from animegamer.models.decoder import AnimationDecoder
from animegamer.models.encoder import ActionAwareEncoder
from animegamer.models.mllm import NextStateMLLM
from animegamer.models.patch_autoencoder import PatchAutoencoder
from animegamer.pretraining import image_encoder, text

N_TEXT, N_VISUAL, D = 4, 6, 48
LINES = [
    f"Character: {who}; Motion: {how} {what}; Background: {when} {where}."
    for who in ("Nilo", "Mavi and Juno", "尼洛", "ニロ")
    for how in ("gently", "quickly")
    for what in ("run", "talk", "跳舞")
    for when in ("day", "night")
    for where in ("town", "forest", "森")
]
BACKBONES = ("autoencoder", "image_encoder", "text_encoder", "video_base", "language_base")
VOCABULARY = {
    "characters": {"Nilo": {"zh": "尼洛", "ja": "ニロ"}, "Mavi": {"zh": "玛薇"}, "Juno": {}},
    "places": {"town": {"en": ["town"], "zh": ["小镇"]}, "forest": {"en": ["forest", "woods"]}},
    "motions": {"run": {"en": ["run", "sprint"], "zh": ["跑步"]}},
}


def tiny_config(checkpoint: Path, output: Path, **play: object) -> Config:
    """Shots of 5 frames of 16 x 24 pixels."""
    return Config(
        shot=ShotConfig(5, 8, 16, 24),
        backbones=BackbonesConfig(
            **{name: str(checkpoint / "backbones" / name) for name in BACKBONES},
            latent_scale=1.0,
            text_tokens=N_TEXT,
            visual_tokens=N_VISUAL,
            image_height=16,
            image_width=24,
        ),
        sampling=SamplingConfig(steps=2, guidance="constant", scale=1.5, batch_size=2),
        mllm=MllmConfig(lora=LoraConfig(2, 2.0)),
        play=PlayConfig(checkpoint=str(checkpoint), output=str(output), upscale=4, **play),
    )


def make_video_base(checkpoint: Path, height: int, width: int, frames: int = 17) -> None:
    """Adds a stock text-to-video CogVideoX for shots of that size to a checkpoint's backbones."""
    CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=D // 2,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        num_layers=2,
        sample_width=width // 8,
        sample_height=height // 8,
        sample_frames=frames,
        patch_size=2,
        text_embed_dim=16,
        max_text_seq_length=N_TEXT,
    ).save_pretrained(checkpoint / "backbones" / "video_base")


def make_checkpoint(directory: Path) -> Path:
    """Writes every part of a checkpoint, and the configuration beside them."""
    torch.manual_seed(0)
    config = tiny_config(directory, directory / "unused")
    backbones, work = directory / "backbones", directory / "work"
    sizes = TextEncoderSizes(vocabulary=320, width=16, layers=1, heads=2, feed_forward=16)
    text.train_vocabulary(LINES, 120, work / "t5" / "spiece.model", llama=False)
    tokenizer = text.save_t5_tokenizer(work / "t5" / "spiece.model", backbones / "text_encoder")
    t5 = text.build_t5(sizes, len(tokenizer) - text.SENTINELS)
    T5EncoderModel(t5.config).save_pretrained(backbones / "text_encoder")

    clip = ImageEncoderSizes(
        width=16, layers=2, head_width=8, patch=8, embed_dim=8, text_width=48, text_layers=1
    )
    settings = image_encoder.model_config(clip, config.backbones, len(tokenizer))
    tower = image_encoder.build(clip, config.backbones, len(tokenizer))
    image_encoder.save(tower, settings, backbones / "image_encoder")

    autoencoder = PatchAutoencoder(4, 8, 4, 8, 1, 8, 1)
    autoencoder.set_components(torch.rand(8, 3, 5, 16, 24) * 2 - 1)
    autoencoder.save_pretrained(backbones / "autoencoder")

    encoder = ActionAwareEncoder(
        text_tokens=N_TEXT, visual_tokens=N_VISUAL, text_width=16, image_width=16, width=D
    )
    encoder.save_pretrained(directory / "encoder")
    decoder = AnimationDecoder(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        num_layers=1,
        sample_width=3,
        sample_height=2,
        sample_frames=5,
        patch_size=1,
        max_text_seq_length=N_TEXT + N_VISUAL,
        motion_scope_hidden=8,
    )
    decoder.save_pretrained(directory / "decoder")
    save_file({"s_a_null": encoder.null()}, directory / "decoder" / "null.safetensors")
    make_mllm(directory, work, config)
    shutil.rmtree(work)
    configuration.save(replace(config, play=PlayConfig()), directory / "config.yaml")
    (directory / "vocabulary.json").write_text(json.dumps(VOCABULARY), encoding="utf-8")
    return directory


def make_mllm(directory: Path, work: Path, config: Config) -> None:
    """A LoRA on a random Mistral."""
    base = directory / "backbones" / "language_base"
    text.train_vocabulary(LINES, 400, work / "mistral" / "tokenizer.model", llama=True)
    tokenizer = save_tokenizer(work / "mistral" / "tokenizer.model", base)
    MistralForCausalLM(
        MistralConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.2,
        )
    ).save_pretrained(base)
    mllm = NextStateMLLM.from_base(base, config.mllm, N_TEXT + N_VISUAL, D)
    mllm.save_pretrained(directory / "mllm")
