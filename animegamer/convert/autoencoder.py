"""The authors' video autoencoder (``3d-vae.pt``) to diffusers' ``AutoencoderKLCogVideoX``.

The names may stand behind ``first_stage_model.``, as in a whole training checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLCogVideoX

from animegamer.checkpoint import CheckpointError
from animegamer.convert.table import Converted, KeyTable, Row, convert
from animegamer.convert.tensors import (
    SHARD_BYTES,
    LazyTensor,
    TorchFile,
    read_safetensors,
    write_safetensors,
)

STEM = "diffusion_pytorch_model"
ENGINE = "first_stage_model."


def _resnet(theirs: str, ours: str) -> list[Row]:
    """Rows of one residual block; the decoder's norms are conditioned on the latents."""
    rows = [
        Row(f"{theirs}conv{{k}}.conv.{{p}}", (f"{ours}conv{{k}}.conv.{{p}}",)),
        Row(f"{theirs}nin_shortcut.{{p}}", (f"{ours}conv_shortcut.{{p}}",)),
    ]
    return rows + _norm(f"{theirs}norm{{k}}.", f"{ours}norm{{k}}.")


def _norm(theirs: str, ours: str) -> list[Row]:
    parts = ("", "norm_layer.", "conv_y.conv.", "conv_b.conv.")
    return [Row(f"{theirs}{part}{{p}}", (f"{ours}{part}{{p}}",)) for part in parts]


def key_table(levels: int, prefix: str = "") -> KeyTable:
    """The key table of an autoencoder.

    Args:
        levels: of resolution; the decoder counts them from the other end than diffusers does.
        prefix: before every name of theirs.
    """
    rows: list[Row] = []
    for side in ("encoder", "decoder"):
        theirs, ours = f"{prefix}{side}.", f"autoencoder/{side}."
        for end in ("conv_in", "conv_out"):
            rows.append(Row(f"{theirs}{end}.conv.{{p}}", (f"{ours}{end}.conv.{{p}}",)))
        rows += _norm(f"{theirs}norm_out.", f"{ours}norm_out.")
        for i in range(2):
            rows += _resnet(f"{theirs}mid.block_{i + 1}.", f"{ours}mid_block.resnets.{i}.")
    theirs, ours = f"{prefix}encoder.down.{{i}}.", "autoencoder/encoder.down_blocks.{i}."
    rows += _resnet(f"{theirs}block.{{j}}.", f"{ours}resnets.{{j}}.")
    rows.append(Row(f"{theirs}downsample.conv.{{p}}", (f"{ours}downsamplers.0.conv.{{p}}",)))
    for i in range(levels):
        theirs = f"{prefix}decoder.up.{i}."
        ours = f"autoencoder/decoder.up_blocks.{levels - 1 - i}."
        rows += _resnet(f"{theirs}block.{{j}}.", f"{ours}resnets.{{j}}.")
        rows.append(Row(f"{theirs}upsample.conv.{{p}}", (f"{ours}upsamplers.0.conv.{{p}}",)))
    rows.append(Row(f"{prefix}loss.{{rest}}", reason="networks of the training loss"))
    return KeyTable(rows, "released video autoencoder (3d-vae.pt)")


def plan(source: TorchFile) -> tuple[Converted, dict[str, Any]]:
    """Sorts and checks an autoencoder file.

    Returns:
        Our tensors in ``autoencoder``; the settings of an ``AutoencoderKLCogVideoX``, read from
        the tensors. Release: what they do not tell, 32 groups a norm and fourfold compression of
        time, is diffusers' default.

    Raises:
        CheckpointError: names the key that is unknown, missing or of another size.
    """
    prefix = ENGINE if any(key.startswith(ENGINE) for key in source.tensors) else ""
    pattern = re.compile(rf"{re.escape(prefix)}decoder\.up\.(\d+)\.")
    levels = {int(match[1]) for key in source.tensors if (match := pattern.match(key))}
    found = convert(source, key_table(max(levels, default=0) + 1, prefix))
    down = re.compile(r"encoder\.down_blocks\.0\.resnets\.(\d+)\.")
    layers = {int(m[1]) for name in found["autoencoder"] if (m := down.match(name))}
    channels = [
        found.shape("autoencoder", f"encoder.down_blocks.{i}.resnets.0.conv1.conv.weight", 5)[0]
        for i in range(max(levels, default=0) + 1)
    ]
    settings = {
        "in_channels": found.shape("autoencoder", "encoder.conv_in.conv.weight", 5)[1],
        "out_channels": found.shape("autoencoder", "decoder.conv_out.conv.weight", 5)[0],
        "down_block_types": ("CogVideoXDownBlock3D",) * len(channels),
        "up_block_types": ("CogVideoXUpBlock3D",) * len(channels),
        "block_out_channels": tuple(channels),
        "latent_channels": found.shape("autoencoder", "decoder.conv_in.conv.weight", 5)[1],
        "layers_per_block": max(layers) + 1,
    }
    if wrong := [width for width in channels if width % 32]:
        raise CheckpointError(
            f"{source.path}: a layer has {wrong[0]} channels, expected a multiple of the norms' 32 "
            "groups"
        )
    model = _on_meta(settings)
    found.expect("autoencoder", {name: p.shape for name, p in model.state_dict().items()})
    return found, settings


def _on_meta(settings: dict[str, Any]) -> Any:
    kind: Any = AutoencoderKLCogVideoX
    with torch.device("meta"):
        return kind(**settings)


def write(found: Converted, settings: dict[str, Any], directory: Path) -> None:
    """Writes the autoencoder as diffusers reads it."""
    _on_meta(settings).save_config(directory)
    write_safetensors(directory, STEM, found["autoencoder"], SHARD_BYTES)


def read(directory: Path) -> dict[str, dict[str, LazyTensor]]:
    """Maps the autoencoder of a checkpoint. Raises CheckpointError."""
    return {"autoencoder": read_safetensors(directory, STEM)}
