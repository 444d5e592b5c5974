"""The authors' decoder file (``mp_rank_00_model_states.pt``, SAT layout) to encoder and decoder.

The file holds the action-aware encoder, the transformer and its motion-scope embedding, LoRA
merged or kept. With LoRA kept, what lies under it becomes a stock CogVideoX directory
(``backbones/video_base``), whose adaLN is the trained one: the original is not in the file.

Axis letters: D width, N tokens of s_a.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
from diffusers import CogVideoXTransformer3DModel
from safetensors.torch import save_file

from animegamer.atomic import write_text
from animegamer.checkpoint import CheckpointError
from animegamer.config import Config, LoraConfig
from animegamer.convert.positions import read_positions
from animegamer.convert.table import Converted, KeyTable, Row, convert
from animegamer.convert.tensors import (
    SHARD_BYTES,
    LazyTensor,
    TorchFile,
    merge_lora,
    read_safetensors,
    write_safetensors,
)
from animegamer.models.decoder import AnimationDecoder
from animegamer.models.decoder_files import PEFT_PREFIX, lora_settings
from animegamer.models.encoder import ActionAwareEncoder

STEM = "diffusion_pytorch_model"
TRAINED = "ofs_embedding."  # what a stock base has no place for
_ENGINE = "model.diffusion_model."
_LAYER = f"{_ENGINE}transformer.layers.{{n}}."
_ADALN = f"{_ENGINE}mixins.adaln_layer."
_EMBED = f"{_ENGINE}mixins.patch_embed."
_BLOCK = "decoder/transformer_blocks.{n}."
_LORA = f"adapter/{PEFT_PREFIX}transformer_blocks.{{n}}.attn1."
POSITIONS = f"{_ENGINE}mixins.pos_embed.pos_embedding"
_UNUSED = f"{_EMBED}output_mix_layer_norm."
_THIRDS = ((0,), (1,), (2,))
# Theirs holds shift, scale, gate of attention and of MLP for the video, then for the text; ours has
# one layer for the norm before attention and one for that before the MLP.
_MODULATION = ((0, 1, 2, 6, 7, 8), (3, 4, 5, 9, 10, 11))

ROWS = (
    Row(f"{_EMBED}text_proj.{{i}}.{{p}}", ("encoder/text.proj.{i}.{p}",)),
    Row(f"{_EMBED}txt_mix_layer_norm.{{p}}", ("encoder/text.norm.{p}",)),
    Row(f"{_EMBED}ip_proj.{{i}}.{{p}}", ("encoder/visual.proj.{i}.{p}",)),
    Row(f"{_EMBED}ip_mix_layer_norm.{{p}}", ("encoder/visual.norm.{p}",)),
    Row(f"{_EMBED}proj.{{p}}", ("decoder/patch_embed.proj.{p}",)),
    Row(f"{_ENGINE}time_embed.0.{{p}}", ("decoder/time_embedding.linear_1.{p}",)),
    Row(f"{_ENGINE}time_embed.2.{{p}}", ("decoder/time_embedding.linear_2.{p}",)),
    Row(f"{_ENGINE}flow_embed.0.{{p}}", ("decoder/ofs_embedding.linear_1.{p}",)),
    Row(f"{_ENGINE}flow_embed.2.{{p}}", ("decoder/ofs_embedding.linear_2.{p}",)),
    Row(f"{_LAYER}input_layernorm.{{p}}", (f"{_BLOCK}norm1.norm.{{p}}",)),
    Row(f"{_LAYER}post_attention_layernorm.{{p}}", (f"{_BLOCK}norm2.norm.{{p}}",)),
    Row(f"{_LAYER}mlp.dense_h_to_4h.{{p}}", (f"{_BLOCK}ff.net.0.proj.{{p}}",)),
    Row(f"{_LAYER}mlp.dense_4h_to_h.{{p}}", (f"{_BLOCK}ff.net.2.{{p}}",)),
    Row(
        f"{_ADALN}adaLN_modulations.{{n}}.1.{{p}}",
        (f"{_BLOCK}norm1.linear.{{p}}", f"{_BLOCK}norm2.linear.{{p}}"),
        _MODULATION,
    ),
    Row(f"{_ADALN}query_layernorm_list.{{n}}.{{p}}", (f"{_BLOCK}attn1.norm_q.{{p}}",)),
    Row(f"{_ADALN}key_layernorm_list.{{n}}.{{p}}", (f"{_BLOCK}attn1.norm_k.{{p}}",)),
    Row(f"{_ENGINE}transformer.final_layernorm.{{p}}", ("decoder/norm_final.{p}",)),
    Row(f"{_ENGINE}mixins.final_layer.norm_final.{{p}}", ("decoder/norm_out.norm.{p}",)),
    Row(f"{_ENGINE}mixins.final_layer.linear.{{p}}", ("decoder/proj_out.{p}",)),
    Row(f"{_ENGINE}mixins.final_layer.adaLN_modulation.1.{{p}}", ("decoder/norm_out.linear.{p}",)),
    Row(POSITIONS, reason="computed from the sizes"),
    Row(f"{_UNUSED}{{p}}", reason="not used by the authors' network either"),
    Row("first_stage_model.{rest}", reason="frozen autoencoder, see backbones.autoencoder"),
    Row("clip_img_encoder.{rest}", reason="frozen CLIP tower, see backbones.image_encoder"),
    Row("conditioner.{rest}", reason="frozen T5, see backbones.text_encoder"),
)


def _attention(original: str) -> tuple[Row, ...]:
    qkv = tuple(f"{_BLOCK}attn1.to_{name}.{{p}}" for name in "qkv")
    return (
        Row(f"{_LAYER}attention.query_key_value.{original}{{p}}", qkv, _THIRDS),
        Row(f"{_LAYER}attention.dense.{original}{{p}}", (f"{_BLOCK}attn1.to_out.0.{{p}}",)),
    )


def _low_rank() -> tuple[Row, ...]:
    targets = [("query_key_value", i, f"to_{name}") for i, name in enumerate("qkv")]
    return tuple(
        Row(
            f"{_LAYER}attention.{theirs}.matrix_{matrix}.{i}",
            (f"{_LORA}{ours}.lora_{matrix}.weight",),
        )
        for theirs, i, ours in (*targets, ("dense", 0, "to_out.0"))
        for matrix in "AB"
    )


WHAT = "released decoder (SAT layout)"
MERGED = KeyTable((*ROWS, *_attention("")), f"{WHAT} without LoRA")
WITH_LORA = KeyTable((*ROWS, *_attention("original."), *_low_rank()), f"{WHAT} with LoRA")


def plan(source: TorchFile) -> tuple[Converted, dict[str, Any], int]:
    """Sorts and checks a decoder file.

    Returns:
        Our tensors in ``encoder``, ``decoder`` and ``adapter``; the sizes of an
        ``AnimationDecoder``, read from the tensors; the LoRA's rank, 0 without.

    Raises:
        CheckpointError: names the key that is unknown, missing or of another size.
    """
    kept = any(".matrix_A." in key for key in source.tensors)
    found = convert(source, WITH_LORA if kept else MERGED)
    for key in (POSITIONS, f"{_UNUSED}weight", f"{_UNUSED}bias"):
        if key not in found.extras:
            raise CheckpointError(
                f"{source.path}: key {key} is missing: not a whole {found.table.what}"
            )
    sizes = _sizes(found)
    with torch.device("meta"):
        decoder = AnimationDecoder(**sizes)
    found.expect("decoder", {name: p.shape for name, p in decoder.state_dict().items()})
    width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    with torch.device("meta"):
        encoder = ActionAwareEncoder(
            text_width=found.shape("encoder", "text.proj.0.weight", 2)[1],
            image_width=found.shape("encoder", "visual.proj.0.weight", 2)[1],
            width=width,
        )
    found.expect("encoder", {name: p.shape for name, p in encoder.state_dict().items()})
    return found, sizes, _rank(found, sizes["num_layers"], width) if kept else 0


def _sizes(found: Converted) -> dict[str, Any]:
    width, channels, patch, _ = found.shape("decoder", "patch_embed.proj.weight", 4)
    (head,) = found.shape("decoder", "transformer_blocks.0.attn1.norm_q.weight", 1)
    layers = {
        int(match[1])
        for name in found["decoder"]
        if (match := re.match(r"transformer_blocks\.(\d+)\.", name))
    }
    if width % head:
        raise CheckpointError(
            f"{found.source.path}: width {width} is no multiple of the head width {head} (key "
            f"{_ADALN}query_layernorm_list.0.weight)"
        )
    where = f"{found.source.path}: key {POSITIONS}"
    tokens, frames, rows, columns, scale = read_positions(found.extras[POSITIONS], where)
    return {
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "in_channels": channels,
        "out_channels": found.shape("decoder", "proj_out.weight", 2)[0] // patch**2,
        "time_embed_dim": found.shape("decoder", "time_embedding.linear_1.weight", 2)[0],
        "num_layers": max(layers) + 1,
        "sample_width": columns * patch,
        "sample_height": rows * patch,
        "sample_frames": 4 * (frames - 1) + 1,
        "patch_size": patch,
        "max_text_seq_length": tokens,
        "spatial_interpolation_scale": scale,
        "motion_scope_hidden": found.shape("decoder", "ofs_embedding.linear_1.weight", 2)[0],
    }


def _rank(found: Converted, layers: int, width: int) -> int:
    rank, first = 0, ""
    for name, tensor in found["adapter"].items():
        key = found.keys[f"adapter/{name}"]
        found.shape("adapter", name, 2)
        own = tensor.shape[0 if ".lora_A." in name else -1]
        rank, first = rank or own, first or key
        if own != rank:
            raise CheckpointError(
                f"{found.source.path}: key {key} has LoRA rank {own}, but {first} has rank {rank}; "
                "expected one rank"
            )
    shapes = {}
    for n in range(layers):
        for target in ("to_q", "to_k", "to_v", "to_out.0"):
            module = f"{PEFT_PREFIX}transformer_blocks.{n}.attn1.{target}"
            shapes[f"{module}.lora_A.weight"] = (rank, width)
            shapes[f"{module}.lora_B.weight"] = (width, rank)
    found.expect("adapter", shapes)
    return rank


def write(
    found: Converted,
    sizes: dict[str, Any],
    lora: LoraConfig,
    config: Config,
    checkpoint: Path,
    *,
    merge: bool,
) -> None:
    """Writes ``encoder``, ``decoder`` and, with LoRA kept, ``backbones/video_base``.

    Args:
        found: from ``plan``.
        sizes: from ``plan``.
        lora: rank 0 where the file has none.
        config: ``backbones`` divides N into text and visual tokens.
        checkpoint: directory of the whole checkpoint.
        merge: fold the LoRA into the decoder, which then needs no base.
    """
    directory = checkpoint / "decoder"
    with torch.device("meta"):
        decoder = AnimationDecoder(**sizes)
    decoder.save_config(directory)
    weights = found["decoder"]
    if lora.rank and not merge:
        base = "../backbones/video_base"
        _write_base(sizes, weights, checkpoint / "backbones" / "video_base")
        write_safetensors(
            directory / "adapter", "adapter_model", found["adapter"], shard_bytes=None
        )
        settings = lora_settings(lora)
        settings.inference_mode, settings.base_model_name_or_path = True, base
        settings.save_pretrained(str(directory / "adapter"))
        trained = {name: t for name, t in weights.items() if name.startswith(TRAINED)}
        write_safetensors(directory, "trained", trained)
        about = {"format": 1, "base": base}
        write_text(directory / "decoder.json", json.dumps(about, indent=1))
    else:
        if lora.rank:
            weights = merge_lora(weights, found["adapter"], lora.alpha / lora.rank)
        write_safetensors(directory, STEM, weights, SHARD_BYTES)
    encoder = _encoder(found, sizes, config)
    encoder.save_config(checkpoint / "encoder")
    write_safetensors(checkpoint / "encoder", STEM, found["encoder"])
    save_file({"s_a_null": encoder.null().contiguous()}, directory / "null.safetensors")


def _encoder(found: Converted, sizes: dict[str, Any], config: Config) -> ActionAwareEncoder:
    tensors = {name: tensor.make().float() for name, tensor in found["encoder"].items()}
    encoder: ActionAwareEncoder = ActionAwareEncoder(
        text_tokens=config.backbones.text_tokens,
        visual_tokens=config.backbones.visual_tokens,
        text_width=tensors["text.proj.0.weight"].shape[1],
        image_width=tensors["visual.proj.0.weight"].shape[1],
        width=sizes["num_attention_heads"] * sizes["attention_head_dim"],
    )
    encoder.load_state_dict(tensors)
    return encoder


def _write_base(sizes: dict[str, Any], weights: dict[str, LazyTensor], directory: Path) -> None:
    stock, tensors = as_stock(sizes, weights)
    stock.save_config(directory)
    write_safetensors(directory, STEM, tensors, SHARD_BYTES)


def as_stock(
    sizes: dict[str, Any], weights: dict[str, LazyTensor], ofs: dict[str, LazyTensor] | None = None
) -> tuple[Any, dict[str, LazyTensor]]:
    """The decoder as diffusers' own class, on the meta device, and its tensors.

    s_a has the model's width already, so the text projection is the identity. Deviation: the last
    LayerNorm has eps 1e-5 there, 1e-6 in the release.

    Args:
        sizes: of an ``AnimationDecoder``.
        weights: of the decoder; its motion-scope embedding is left out.
        ofs: an embedding of width ``time_embed_dim`` in its place, or None.
    """
    known = inspect.signature(CogVideoXTransformer3DModel.__init__).parameters
    width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    settings = {name: value for name, value in sizes.items() if name in known}
    settings |= {"text_embed_dim": width}
    if ofs is not None:
        settings["ofs_embed_dim"] = settings["time_embed_dim"]
    kind: Any = CogVideoXTransformer3DModel
    with torch.device("meta"):
        stock = kind(**settings)
    tensors = {name: t for name, t in weights.items() if not name.startswith(TRAINED)}
    dtype = weights["patch_embed.proj.weight"].dtype
    for kind, value in (
        ("weight", torch.eye(width, dtype=dtype)),
        ("bias", torch.zeros(width, dtype=dtype)),
    ):
        tensors[f"patch_embed.text_proj.{kind}"] = LazyTensor.of(value)
    return stock, tensors | (ofs or {})


def read(directory: Path) -> tuple[dict[str, dict[str, LazyTensor]], dict[str, Any], float]:
    """Maps the decoder of one of our checkpoints, whoever made it.

    Args:
        directory: as ``decoder_files.save_decoder`` writes it.

    Returns:
        ``decoder`` (without LoRA) and ``adapter`` (empty if it has none); its sizes; the adapter's
        alpha / rank.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    known = inspect.signature(AnimationDecoder.__init__).parameters
    try:
        config = AnimationDecoder.load_config(directory)
        sizes = {name: value for name, value in config.items() if name in known}
        if not (directory / "decoder.json").is_file():
            return {"decoder": read_safetensors(directory, STEM), "adapter": {}}, sizes, 0.0
        about = json.loads((directory / "decoder.json").read_text(encoding="utf-8"))
        settings = json.loads(
            (directory / "adapter/adapter_config.json").read_text(encoding="utf-8")
        )
        base, scale = directory / about["base"], settings["lora_alpha"] / settings["r"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}: not a whole saved decoder ({error})") from error
    weights = {
        name: tensor
        for name, tensor in read_safetensors(base, STEM).items()
        if not name.startswith("patch_embed.text_proj.")
    }
    weights |= read_safetensors(directory, "trained")
    adapter = read_safetensors(directory / "adapter", "adapter_model")
    return {"decoder": weights, "adapter": adapter}, sizes, scale
