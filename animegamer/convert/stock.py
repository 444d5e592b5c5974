"""Our checkpoints as diffusers and transformers load them without our code: LoRA merged.

Autoencoder, T5, CLIP and a Mistral without LoRA are in those libraries' layouts already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers.models.embeddings import Timesteps
from torch.nn.functional import pad, silu
from transformers import MistralConfig

from animegamer.checkpoint import CheckpointError, replace_directory
from animegamer.convert import decoder, mllm
from animegamer.convert.tensors import SHARD_BYTES, LazyTensor, merge_lora, write_safetensors
from animegamer.game import MotionScope
from animegamer.language import load_tokenizer


def to_stock(checkpoint: str | Path, output: str | Path) -> str:
    """Writes a checkpoint's networks for other programs.

    ``transformer/`` is a ``CogVideoXTransformer3DModel``: s_a goes in as ``encoder_hidden_states``,
    the motion scope's scalar as ``ofs``. ``language_model/`` is a ``MistralForCausalLM`` with its
    tokenizer.

    Args:
        checkpoint: with ``decoder/``, ``mllm/`` or both, whoever made it.
        output: where to; it must not exist.

    Returns:
        What was written, as text.

    Raises:
        CheckpointError: if there is neither, a file is missing or damaged, or ``output`` is there.
    """
    checkpoint, output, lines = Path(checkpoint), Path(output), []
    if output.exists():
        raise CheckpointError(f"{output} is there already: name a new directory")
    if not any((checkpoint / part).is_dir() for part in ("decoder", "mllm")):
        raise CheckpointError(f"{checkpoint} has neither decoder/ nor mllm/")

    def write(temporary: Path) -> None:
        if (checkpoint / "decoder").is_dir():
            lines.append(_write_transformer(checkpoint / "decoder", temporary / "transformer"))
        if (checkpoint / "mllm").is_dir():
            lines.append(_write_language_model(checkpoint, temporary / "language_model"))

    replace_directory(output, write)
    return "\n".join(lines)


def _write_transformer(source: Path, directory: Path) -> str:
    files, sizes, scale = decoder.read(source)
    weights, line = merge_lora(files["decoder"], files["adapter"], scale), "no motion scope"
    ofs = None
    if sizes.get("motion_scope", True):
        ofs, error = solve_motion_scope(weights, sizes)
        line = f"motion scope as ofs, largest error {error:.0e} at {MotionScope.SCALARS}"
    stock, tensors = decoder.as_stock(sizes, weights, ofs)
    stock.save_config(directory)
    write_safetensors(directory, decoder.STEM, tensors, SHARD_BYTES)
    count = sum(tensor.numel for tensor in tensors.values())
    return f"transformer/     {len(tensors)} tensors, {count:,} parameters; {line}"


def _write_language_model(checkpoint: Path, directory: Path) -> str:
    files, settings, scale = mllm.read(
        checkpoint / "mllm", checkpoint / "backbones" / "language_base"
    )
    weights = merge_lora(files["base"], files["adapter"], scale)
    mllm.write_mistral(directory, MistralConfig.from_dict(settings), weights)
    load_tokenizer(checkpoint / "mllm" / "tokenizer").save_pretrained(str(directory))
    count = sum(tensor.numel for tensor in weights.values())
    return f"language_model/  {len(weights)} tensors, {count:,} parameters"


def solve_motion_scope(
    weights: dict[str, LazyTensor], sizes: dict[str, Any]
) -> tuple[dict[str, LazyTensor], float]:
    """Our motion-scope embedding in the form that diffusers' ``ofs`` has.

    Ours is a sinusoid of the model's width and an MLP; the stock class ties both widths to
    ``time_embed_dim``. Play uses five scalars only, so the first layer is solved to give what ours
    gives there (least norm); the second stays as it is. Between the five values they differ.

    Returns:
        ``ofs_embedding.*``, and the largest error at the five scalars.

    Raises:
        CheckpointError: if the stock class has no room for it.
    """
    width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    time, hidden = sizes["time_embed_dim"], sizes.get("motion_scope_hidden", 512)
    if hidden > time or time < len(MotionScope.SCALARS):
        raise CheckpointError(
            f"the motion-scope MLP is {hidden} wide; diffusers' class has room for {time} "
            f"(time_embed_dim), and at least {len(MotionScope.SCALARS)} are needed"
        )
    prefix = decoder.TRAINED
    parts = ("linear_1.weight", "linear_1.bias", "linear_2.weight", "linear_2.bias")
    first, bias, second, shift = (weights[prefix + name].make().double() for name in parts)
    scalars = torch.tensor(MotionScope.SCALARS)
    ours, theirs = (Timesteps(n, True, 0)(scalars).double() for n in (width, time))
    inner = ours @ first.T
    solved = torch.linalg.lstsq(theirs, inner, driver="gelsd").solution.T
    dtype = weights[prefix + parts[0]].dtype
    missing = time - hidden
    new = (
        pad(solved, (0, 0, 0, missing)),
        pad(bias, (0, missing)),
        pad(second, (0, missing)),
        shift,
    )
    w1, b1, w2, b2 = (tensor.to(dtype).double() for tensor in new)
    got = silu(theirs @ w1.T + b1) @ w2.T + b2
    error = (got - (silu(inner + bias) @ second.T + shift)).abs().max().item()
    values = (tensor.to(dtype) for tensor in new)
    return {prefix + n: LazyTensor.of(v) for n, v in zip(parts, values, strict=True)}, error
