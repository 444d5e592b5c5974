"""Files shaped like the authors' release: their key names, random weights, any size.

``test_convert.py`` holds the names against those of the fixtures in ``tests/data/parity``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.models.embeddings import get_3d_sincos_pos_embed

from animegamer.language import add_special_tokens, load_tokenizer

ENGINE = "model.diffusion_model."
POSITIONS = f"{ENGINE}mixins.pos_embed.pos_embedding"
FILES = {
    "mllm": "pytorch_model.bin",
    "decoder": "mp_rank_00_model_states.pt",
    "autoencoder": "3d-vae.pt",
}


@dataclass(frozen=True)
class DecoderSizes:
    """Of the released decoder, unless said otherwise."""

    layers: int = 30
    heads: int = 30
    head: int = 64
    time: int = 512
    scope: int = 512
    text: int = 4096
    image: int = 768
    channels: int = 16
    patch: int = 2
    rank: int = 64
    tokens: int = 226
    frames: int = 5
    rows: int = 30
    columns: int = 45

    @property
    def width(self) -> int:
        return self.heads * self.head


def _linear(name: str, rows: int, *columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, *columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def decoder_shapes(s: DecoderSizes, *, lora: bool = True) -> dict[str, tuple[int, ...]]:
    """Key names and shapes of a decoder file; without LoRA as it looks merged."""
    d, shapes = s.width, {}
    for name, into in (("text_proj", s.text), ("ip_proj", s.image)):
        shapes |= _linear(f"mixins.patch_embed.{name}.0", d, into)
        shapes |= _linear(f"mixins.patch_embed.{name}.2", d, d)
    for name in ("txt", "ip", "output"):
        shapes |= _norm(f"mixins.patch_embed.{name}_mix_layer_norm", d)
    shapes |= _linear("mixins.patch_embed.proj", d, s.channels, s.patch, s.patch)
    positions = s.tokens + s.frames * s.rows * s.columns
    shapes["mixins.pos_embed.pos_embedding"] = (1, positions, d)
    for name, inner in (("time_embed", s.time), ("flow_embed", s.scope)):
        shapes |= _linear(f"{name}.0", inner, d) | _linear(f"{name}.2", s.time, inner)
    for n in range(s.layers):
        layer = f"transformer.layers.{n}"
        shapes |= _norm(f"{layer}.input_layernorm", d)
        shapes |= _norm(f"{layer}.post_attention_layernorm", d)
        shapes |= _linear(f"{layer}.mlp.dense_h_to_4h", 4 * d, d)
        shapes |= _linear(f"{layer}.mlp.dense_4h_to_h", d, 4 * d)
        shapes |= _linear(f"mixins.adaln_layer.adaLN_modulations.{n}.1", 12 * d, s.time)
        for name in ("query", "key"):
            shapes |= _norm(f"mixins.adaln_layer.{name}_layernorm_list.{n}", s.head)
        for name, parts in (("query_key_value", 3), ("dense", 1)):
            full = f"{layer}.attention.{name}"
            shapes |= _linear(f"{full}.original" if lora else full, parts * d, d)
            for i in range(parts if lora else 0):
                shapes[f"{full}.matrix_A.{i}"] = (s.rank, d)
                shapes[f"{full}.matrix_B.{i}"] = (d, s.rank)
    shapes |= _norm("transformer.final_layernorm", d)
    shapes |= _norm("mixins.final_layer.norm_final", d)
    shapes |= _linear("mixins.final_layer.linear", s.patch**2 * s.channels, d)
    shapes |= _linear("mixins.final_layer.adaLN_modulation.1", 2 * d, s.time)
    return {ENGINE + name: shape for name, shape in shapes.items()}


def positions(s: DecoderSizes) -> torch.Tensor:
    """The stored table, (1, N + frames * rows * columns, D)."""
    table = get_3d_sincos_pos_embed(s.width, (s.columns, s.rows), s.frames, 1.875)
    return torch.cat([torch.zeros(s.tokens, s.width), table.flatten(0, 1).float()])[None]


@dataclass(frozen=True)
class MllmSizes:
    """Of the released MLLM, unless said otherwise."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32284
    width: int = 1920
    inner: int = 4096
    rank: int = 32


def mllm_shapes(s: MllmSizes) -> dict[str, tuple[int, ...]]:
    """Key names and shapes of an MLLM file."""
    llm = "llm.base_model.model."
    shapes: dict[str, tuple[int, ...]] = {
        f"{llm}model.embed_tokens.weight": (s.vocabulary, s.hidden),
        f"{llm}lm_head.weight": (s.vocabulary, s.hidden),
    }
    norms, kv = ["model.norm"], s.hidden // s.heads * s.kv_heads
    for n in range(s.layers):
        layer = f"model.layers.{n}"
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        for name, rows, columns in (
            ("self_attn.q_proj", s.hidden, s.hidden),
            ("self_attn.k_proj", kv, s.hidden),
            ("self_attn.v_proj", kv, s.hidden),
            ("self_attn.o_proj", s.hidden, s.hidden),
            ("mlp.gate_proj", s.intermediate, s.hidden),
            ("mlp.up_proj", s.intermediate, s.hidden),
            ("mlp.down_proj", s.hidden, s.intermediate),
        ):
            full = f"{llm}{layer}.{name}"
            shapes[f"{full}.base_layer.weight"] = (rows, columns)
            shapes[f"{full}.lora_A.default.weight"] = (s.rank, columns)
            shapes[f"{full}.lora_B.default.weight"] = (rows, s.rank)
    for name in norms:
        for kind in ("original_module", "modules_to_save.default"):
            shapes[f"{llm}{name}.{kind}.weight"] = (s.hidden,)
    shapes |= _linear("input_resampler.proj.0", s.inner, s.width)
    shapes |= _linear("input_resampler.proj.2", s.hidden, s.inner)
    shapes |= _linear("output_resampler.proj.0", s.width, s.hidden)
    shapes |= _linear("output_resampler.proj.2", s.width, s.width)
    return shapes


@dataclass(frozen=True)
class AutoencoderSizes:
    """Of CogVideoX's autoencoder, unless said otherwise."""

    channels: tuple[int, ...] = (128, 256, 256, 512)
    blocks: int = 3
    latent: int = 16


def autoencoder_shapes(s: AutoencoderSizes) -> dict[str, tuple[int, ...]]:
    """Key names and shapes of an autoencoder file."""
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, into: int, out: int, kernel: int = 3) -> None:
        shapes.update(_linear(f"{name}.conv", out, into, kernel, kernel, kernel))

    def norm(name: str, width: int) -> None:
        if name.startswith("encoder."):
            shapes.update(_norm(name, width))
        else:
            shapes.update(_norm(f"{name}.norm_layer", width))
            convolution(f"{name}.conv_y", s.latent, width, 1)
            convolution(f"{name}.conv_b", s.latent, width, 1)

    def block(name: str, into: int, out: int) -> None:
        norm(f"{name}.norm1", into)
        convolution(f"{name}.conv1", into, out)
        norm(f"{name}.norm2", out)
        convolution(f"{name}.conv2", out, out)
        if into != out:
            shapes.update(_linear(f"{name}.nin_shortcut", out, into, 1, 1, 1))

    levels, deep = len(s.channels), s.channels[-1]
    for side, into, out in (("encoder", 3, 2 * s.latent), ("decoder", s.latent, 3)):
        down = side == "encoder"
        convolution(f"{side}.conv_in", into, s.channels[0] if down else deep)
        width = s.channels[0] if down else deep
        for i in range(levels) if down else reversed(range(levels)):
            name = f"{side}.{'down' if down else 'up'}.{i}"
            for j in range(s.blocks + (not down)):
                block(f"{name}.block.{j}", width, s.channels[i])
                width = s.channels[i]
            if i != (levels - 1 if down else 0):
                sample = f"{name}.{'down' if down else 'up'}sample.conv"
                shapes.update(_linear(sample, width, width, 3, 3))
        for i in (1, 2):
            block(f"{side}.mid.block_{i}", deep, deep)
        norm(f"{side}.norm_out", width)
        convolution(f"{side}.conv_out", width, out)
    return shapes


def random_weights(
    shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Weights of fan-in scale, norms near one, so that every branch matters."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            values = values / torch.tensor(shape[1:]).prod().sqrt()
        else:
            values = 0.1 * values + ("norm" in name and name.endswith("weight"))
        weights[name] = values.to(dtype)
    return weights


SMALL_DECODER = DecoderSizes(
    layers=3, heads=2, head=24, time=20, scope=12, text=16, image=16, channels=4, patch=1, rank=3,
    tokens=10, frames=3, rows=2, columns=3,
)  # fmt: skip
SMALL_AUTOENCODER = AutoencoderSizes((32, 32, 64, 64), 1, 4)


def make_release(directory: Path, language_base: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes three files of the release whose sizes fit each other and ``tiny_checkpoint``.

    Args:
        directory: where to.
        language_base: the small Mistral that the MLLM stands on.
        dtype: of the weights.
    """
    from transformers import MistralConfig

    base = MistralConfig.from_pretrained(language_base)
    tokenizer = load_tokenizer(language_base)
    add_special_tokens(tokenizer, 16)
    sizes = MllmSizes(
        layers=base.num_hidden_layers,
        hidden=base.hidden_size,
        intermediate=base.intermediate_size,
        heads=base.num_attention_heads,
        kv_heads=base.num_key_value_heads,
        vocabulary=len(tokenizer),
        width=SMALL_DECODER.width,
        inner=40,
        rank=5,
    )
    decoder = random_weights(decoder_shapes(SMALL_DECODER), 1, dtype)
    decoder[POSITIONS] = positions(SMALL_DECODER).to(dtype)
    decoder["conditioner.embedders.0.transformer.shared.weight"] = torch.ones(3, 2)
    autoencoder = random_weights(autoencoder_shapes(SMALL_AUTOENCODER), 2, dtype)
    autoencoder["loss.discriminator.weight"] = torch.ones(2)
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(random_weights(mllm_shapes(sizes), 3, dtype), directory / FILES["mllm"])
    torch.save({"module": decoder, "iteration": 7000}, directory / FILES["decoder"])
    torch.save({"state_dict": autoencoder}, directory / FILES["autoencoder"])
    return directory
