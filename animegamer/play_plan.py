"""Memory plan of play: what lies on which device, for the configured ``play.memory``.

Weights are counted; what a pass needs beside them comes from the pass itself on fake tensors
(``step_memory``): the prompt of a full window, one denoising step with guidance, one decoded batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from animegamer.config import Config
from animegamer.drawing import precision
from animegamer.game import CharacterState, GameState, Instruction, MotionScope, Turn
from animegamer.game_data import collate_rendered
from animegamer.models import skeleton
from animegamer.models.backbones import Autoencoder
from animegamer.models.decoder import AnimationDecoder
from animegamer.models.mistral import CACHE
from animegamer.models.mllm import NextStateMLLM
from animegamer.step_memory import trace_prediction

# Bytes of a number: int8, or 4 bits with doubly quantised scales of 64 numbers each (QLoRA).
_QUANTISED = {"int8": 1.0, "nf4": 0.5 + 0.127 / 8}


@dataclass(frozen=True)
class Part:
    """One network of play.

    Attributes:
        name: what it is.
        device: where it works.
        kind: ``stays``, ``turns`` or ``layers``.
        weights: bytes of all of its weights.
        streamed: bytes of weights on the device while it works.
        working: bytes that a pass takes beside the weights.
    """

    name: str
    device: str
    kind: str
    weights: int
    streamed: int
    working: int


def mllm_pass(config: Config, model: NextStateMLLM) -> Callable[[], Any]:
    """The prompt of one game whose window is full, into a cache."""
    instruction = Instruction(("A",), "b", "c")
    state = GameState(MotionScope(1), CharacterState(0, 0, 0))
    history = [Turn(instruction, state)] * (config.play.window - 1)
    with torch.device("cpu"):
        batch = collate_rendered([model.language.render(history, instruction)])

    def run() -> Any:
        shape = (1, max(1, len(history)), model.num_tokens, model.width)
        batch.s_a = torch.rand(shape, dtype=torch.float32)
        cache = DynamicCache()
        hidden = model.hidden_states(batch, use_cache=True, **{CACHE: cache})
        return hidden, cache

    return run


def decoder_pass(config: Config, model: AnimationDecoder, dtype: torch.dtype) -> Callable[[], Any]:
    """One denoising step of ``sampling.batch_size`` shots with weights of a type."""
    size = config.sampling.batch_size * (1 if config.sampling.guidance == "none" else 2)
    settings = model.config
    frames = (settings.sample_frames - 1) // settings.temporal_compression_ratio + 1
    shape = (frames, settings.in_channels, settings.sample_height, settings.sample_width)
    tokens = (settings.max_text_seq_length, model.patch_embed.proj.out_channels)

    def run() -> Any:
        latents = torch.rand(size, *shape, dtype=torch.float32)
        s_a = torch.rand(size, *tokens, dtype=torch.float32)
        t, f_ms = torch.full((size,), 999), torch.ones(size)
        return latents, model.predict(latents.to(dtype), t, s_a, f_ms)

    return run


def autoencoder_pass(config: Config, model: Autoencoder) -> Callable[[], Any]:
    """Decodes ``sampling.batch_size`` shots."""
    base = skeleton.sizes(config, "video_base")
    frames = (config.shot.frames - 1) // base["temporal_compression_ratio"] + 1
    shape = (frames, base["in_channels"], base["sample_height"], base["sample_width"])
    return lambda: model.decode(torch.rand(config.sampling.batch_size, *shape))


def build_autoencoder(config: Config) -> Autoencoder:
    """The autoencoder as play has it, on torch's default device."""
    network: Any = skeleton.autoencoder(config)
    if config.play.memory.autoencoder_tiling:
        network.enable_tiling()
    if config.play.memory.autoencoder_slicing:
        network.enable_slicing()
    return Autoencoder(network, config.backbones.latent_scale)


def parts(config: Config) -> list[Part]:
    """All networks of play, in the order in which a turn needs them.

    Raises:
        ConfigError: if a backbone's sizes are not there.
    """
    memory, default = config.play.memory, config.play.device
    with torch.device("meta"):
        mllm = skeleton.mllm(config)
        encoder, decoder = skeleton.encoder_and_decoder(config)
        autoencoder = build_autoencoder(config)
        readers = [encoder, skeleton.image_encoder(config), skeleton.text_encoder(config)]
    half, drawn = precision(config, "mllm"), precision(config, "decoder")
    pixels = precision(config, "autoencoder")
    reader = sum(_bytes(network, torch.float32) for network in readers[:2])
    reader += _bytes(readers[2], precision(config, "reader"))
    weights = _mllm_bytes(config, mllm, half)
    layers = mllm.mistral.model.layers
    largest = max(p.numel() for p in layers.parameters()) * half.itemsize
    by_layers = weights - _bytes(layers, half) + largest
    # The next block comes while one computes.
    blocks = decoder.transformer_blocks
    by_blocks = _bytes(decoder, drawn) - _bytes(blocks, drawn) + 2 * _bytes(blocks[0], drawn)
    whole = {"MLLM": weights, "decoder": _bytes(decoder, drawn)}
    whole |= {"autoencoder": _bytes(autoencoder, pixels), "encoder, CLIP, T5": reader}
    working = {
        "MLLM": _working(mllm, mllm_pass(config, mllm), half),
        "decoder": _working(decoder, decoder_pass(config, decoder, drawn), drawn),
        "autoencoder": _working(autoencoder, autoencoder_pass(config, autoencoder), pixels),
    }
    places = {
        "MLLM": (memory.mllm_device, memory.mllm),
        "decoder": (memory.decoder_device, memory.decoder),
        "autoencoder": (
            memory.decoder_device,
            "turns" if memory.decoder == "layers" else memory.decoder,
        ),
        "encoder, CLIP, T5": (memory.reader_device, memory.reader),
    }
    found = []
    for name, (device, kind) in places.items():
        streamed = whole[name]
        if kind == "layers":
            streamed = by_layers if name == "MLLM" else by_blocks
        found.append(
            Part(name, device or default, kind, whole[name], streamed, working.get(name, 0))
        )
    return found


def peaks(found: list[Part]) -> dict[str, int]:
    """Most bytes on each device while any one part works, and in host memory while all wait."""
    peak: dict[str, int] = {}
    for device in dict.fromkeys(part.device for part in found):
        here = [part for part in found if part.device == device]
        moments = [
            part.streamed
            + part.working
            + sum(o.weights for o in here if o is not part and o.kind == "stays")
            for part in here
        ]
        peak[device] = max(moments)
    peak["host memory, waiting"] = sum(p.weights for p in found if p.kind != "stays")
    return peak


def _bytes(network: nn.Module, dtype: torch.dtype) -> int:
    numbers = sum(t.numel() for t in (*network.parameters(), *network.buffers()))
    return numbers * dtype.itemsize


def _mllm_bytes(config: Config, model: NextStateMLLM, dtype: torch.dtype) -> int:
    """Weights of the MLLM: PEFT keeps LoRA in float32; quantised layers are smaller."""
    size = _QUANTISED.get(config.play.memory.mllm_weights, float(dtype.itemsize))
    lora = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    linear = sum(
        module.weight.numel()
        for name, module in model.mistral.model.layers.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    )
    others = sum(p.numel() for p in model.parameters()) - lora - linear
    return int(linear * size) + 4 * lora + others * dtype.itemsize


def _working(model: nn.Module, run: Callable[[], Any], dtype: torch.dtype) -> int:
    return trace_prediction(model, run, dtype=dtype).peak()
