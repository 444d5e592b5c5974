"""Models of the configured sizes without their weights, for counting and for planning memory.

Sizes come from the ``config.json`` of each backbone's directory or, where that is not there, from
``plan.sizes``. Everything is built on the current default device: on ``torch.device("meta")``
the 7B model takes no memory.

Axis letters: B batch, T turns, N tokens of s_a, D width.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from animegamer.config import Config, ConfigError
from animegamer.data import ShotBatch
from animegamer.game import CharacterState, GameState, Instruction, MotionScope, Turn
from animegamer.game_data import GameBatch, collate_rendered
from animegamer.language import Language, special_tokens
from animegamer.models.decoder import AnimationDecoder, inherited_sizes
from animegamer.models.decoder_files import add_lora as add_decoder_lora
from animegamer.models.encoder import ActionAwareEncoder
from animegamer.models.mistral import add_lora
from animegamer.models.mllm import NextStateMLLM
from animegamer.models.shot_model import ShotModel, fitting_encoder, num_tokens
from animegamer.models.state_model import StateModel

_INSTRUCTION = Instruction(("A",), "b", "c")


def sizes(config: Config, name: str) -> dict[str, Any]:
    """The sizes of a backbone: its own configuration file, or the one in ``plan.sizes``.

    Args:
        config: where both lie.
        name: of the backbone, such as ``language_base``.

    Raises:
        ConfigError: if neither is there, or one cannot be read.
    """
    file = "open_clip_config.json" if name == "image_encoder" else "config.json"
    own = Path(getattr(config.backbones, name)) / file
    path = own if own.is_file() else Path(config.plan.sizes) / f"{name}.json"
    if not path.is_file():
        raise ConfigError(
            f"no sizes of {name}: neither {own} nor {path} is there; correct backbones.{name} or "
            "plan.sizes"
        )
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return dict(tree["model_cfg"] if name == "image_encoder" else tree)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the sizes of {name} ({error})") from None


def text_encoder(config: Config) -> nn.Module:
    """T5's encoder."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**sizes(config, "text_encoder")))


def image_encoder(config: Config) -> nn.Module:
    """CLIP's image tower."""
    from open_clip.model import CLIP

    return CLIP(**sizes(config, "image_encoder")).visual


def autoencoder(config: Config) -> nn.Module:
    """The video autoencoder."""
    from diffusers import AutoencoderKLCogVideoX

    from animegamer.models.patch_autoencoder import PatchAutoencoder

    tree = sizes(config, "autoencoder")
    kinds = {kind.__name__: kind for kind in (AutoencoderKLCogVideoX, PatchAutoencoder)}
    kind = kinds.get(tree.get("_class_name", ""))
    if kind is None:
        raise ConfigError(f"autoencoder of class {tree.get('_class_name')!r}, expected {[*kinds]}")
    return kind.from_config(tree)


def encoder_and_decoder(config: Config) -> tuple[ActionAwareEncoder, AnimationDecoder]:
    """Encoder and decoder, the decoder with LoRA if configured."""
    backbones = config.backbones
    f_v = (backbones.visual_tokens, int(sizes(config, "image_encoder")["vision_cfg"]["width"]))
    f_md = (backbones.text_tokens, int(sizes(config, "text_encoder")["d_model"]))
    decoder = AnimationDecoder(
        **inherited_sizes(sizes(config, "video_base")),
        sample_frames=config.shot.frames,
        max_text_seq_length=num_tokens(config, f_v[0], f_md[0]),
        motion_scope=config.decoder.motion_scope,
        motion_scope_hidden=config.decoder.motion_scope_hidden,
    )
    if config.decoder.lora.rank:
        add_decoder_lora(decoder, config.decoder.lora, backbones.video_base)
    return fitting_encoder(config, decoder, f_v, f_md), decoder


def shot_model(config: Config, with_encoder: bool) -> ShotModel:
    """What stage 1 trains, or without encoder what stage 3 does."""
    encoder, decoder = encoder_and_decoder(config)
    if config.decoder.gradient_checkpointing:
        decoder.enable_gradient_checkpointing()
    if with_encoder:
        null = torch.zeros(encoder.config.text_tokens, encoder.config.text_width)
        return ShotModel(encoder, decoder, config.diffusion, null)
    null = torch.zeros(encoder.num_tokens, encoder.config.width)
    return ShotModel(None, decoder, config.diffusion, s_a_null=null)


def mllm(config: Config) -> NextStateMLLM:
    """The MLLM, its vocabulary grown by the special tokens, with LoRA if configured."""
    from transformers import MistralConfig, MistralForCausalLM

    tree = {**sizes(config, "language_base")}
    backbones = config.backbones
    base = sizes(config, "video_base")
    width = int(base["num_attention_heads"] * base["attention_head_dim"])
    tokens = num_tokens(config, backbones.visual_tokens, backbones.text_tokens)
    words = Words(int(tree.pop("vocab_size")), tokens)
    settings = MistralConfig(**tree, vocab_size=len(words))
    llm: Any = MistralForCausalLM._from_config(settings, attn_implementation="sdpa")
    if config.mllm.lora.rank:
        llm = add_lora(llm, config.mllm.lora)
    language = Language(words, tokens, config.mllm.max_turn_tokens)
    words.longest = language.max_text_tokens
    model = NextStateMLLM(llm, language, config.mllm, width)
    if config.mllm.gradient_checkpointing:
        model.mistral.gradient_checkpointing_enable()
    return model


def state_model(config: Config) -> StateModel:
    """What stage 2 trains."""
    encoder, _ = encoder_and_decoder(config)
    return StateModel(encoder, mllm(config))


class Words:
    """Stands where a tokenizer does: ids of special tokens, and the longest text a turn can hold.

    Args:
        vocabulary: tokens of the base.
        slots: N; there are as many ``<frame_i>`` as the next power of two (release: 256 for 226).
    """

    unk_token_id, bos_token_id = 0, 1

    def __init__(self, vocabulary: int, slots: int) -> None:
        names = special_tokens(1 << (slots - 1).bit_length())
        self.ids = {name: vocabulary + place for place, name in enumerate(names)}
        self.vocabulary, self.longest = vocabulary, 0

    def __len__(self) -> int:
        """Tokens, the special ones included."""
        return self.vocabulary + len(self.ids)

    def convert_tokens_to_ids(self, names: list[str]) -> list[int]:
        """Ids of special tokens."""
        return [self.ids[name] for name in names]

    def get_added_vocab(self) -> dict[str, int]:
        """Nothing is reserved: no text is read."""
        return {}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """``<TURN>`` and as many tokens as a turn has room for, whatever the text."""
        return {"input_ids": [self.ids["<TURN>"], *[2] * self.longest]}


def shot_batch(config: Config, model: ShotModel) -> ShotBatch:
    """A batch of ``train.batch_size`` shots for ``shot_model``."""
    size, settings = config.train.batch_size, model.decoder.config
    frames = (settings.sample_frames - 1) // settings.temporal_compression_ratio + 1
    grid = (settings.sample_height, settings.sample_width)
    tokens = (settings.max_text_seq_length, model.decoder.patch_embed.proj.out_channels)
    f_v, f_md = (1, 1), (1, 1)
    if model.encoder is not None:
        about = model.encoder.config
        f_v = (about.visual_tokens, about.image_width)
        f_md = (about.text_tokens, about.text_width)
    return ShotBatch(
        latents=torch.rand(size, frames, settings.in_channels, *grid),
        f_v=torch.rand(size, *f_v),
        f_md=torch.rand(size, *f_md),
        f_ms=torch.ones(size),
        text_kept=torch.ones(size, dtype=torch.bool),
        image_kept=torch.ones(size, dtype=torch.bool),
        s_a_hat=None if model.encoder is not None else torch.rand(size, *tokens),
    )


def game_batch(config: Config, model: StateModel) -> GameBatch:
    """The longest batch of ``train.batch_size`` games: all turns predicted, texts that fill them.

    Its integer columns are real numbers on the CPU, also under a default device that holds none.
    """
    turns = config.data.max_turns
    state = GameState(MotionScope(1), CharacterState(0, 0, 0))
    played = [Turn(_INSTRUCTION, state)] * turns
    with torch.device("cpu"):
        rendered = model.mllm.language.render_training(played, [True] * turns)
        batch = collate_rendered([rendered] * config.train.batch_size)
    about = model.encoder.config
    shape = (config.train.batch_size, turns)
    batch.f_v = torch.rand(*shape, about.visual_tokens, about.image_width)
    batch.f_md = torch.rand(*shape, about.text_tokens, about.text_width)
    return batch
