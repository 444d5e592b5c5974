"""Reads and writes the animation decoder: whole in diffusers' layout, or as LoRA on its base.

With LoRA, a directory holds ``config.json`` (sizes), ``adapter/`` (PEFT layout),
``trained.safetensors`` (what trained whole: adaLN, motion-scope embedding) and ``decoder.json``
(where the base lies).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from animegamer.atomic import write_text
from animegamer.checkpoint import CheckpointError, load_model
from animegamer.config import LoraConfig
from animegamer.models.decoder import AnimationDecoder

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
PEFT_PREFIX = "base_model.model."  # what a PeftModel puts before the names of the model it wraps


def lora_settings(lora: LoraConfig) -> Any:
    """PEFT's settings of the adapter on q, k, v and output (paper C.1; release: alpha 1)."""
    from peft import LoraConfig as PeftLora

    return PeftLora(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=TARGETS,
    )


def add_lora(decoder: AnimationDecoder, lora: LoraConfig, base: str | Path) -> None:
    """Puts a PEFT adapter on every attention (see ``lora_settings``).

    Args:
        decoder: changed in place.
        lora: rank, alpha, dropout.
        base: the directory that the decoder's weights come from; saved files refer to it.
    """
    decoder.add_adapter(lora_settings(lora))
    decoder.lora_base = Path(base)


def save_decoder(
    decoder: AnimationDecoder, directory: str | Path, dtype: torch.dtype | None = None
) -> None:
    """Writes what was trained; the decoder itself stays as it is.

    Args:
        decoder: whole, or with LoRA.
        directory: where to.
        dtype: of the weights on disk; None keeps theirs.
    """
    directory = Path(directory)
    if not hasattr(decoder, "lora_base"):
        decoder.save_pretrained(directory)
        if dtype is not None:
            file = directory / "diffusion_pytorch_model.safetensors"
            save_file(_cast(load_file(file), dtype), file, {"format": "pt"})
        return
    from peft import get_peft_model_state_dict

    (directory / "adapter").mkdir(parents=True, exist_ok=True)
    decoder.save_config(directory)
    adapter = {PEFT_PREFIX + k: v for k, v in get_peft_model_state_dict(decoder).items()}
    save_file(
        _cast(adapter, dtype), directory / "adapter/adapter_model.safetensors", {"format": "pt"}
    )
    decoder.peft_config["default"].save_pretrained(str(directory / "adapter"))
    whole = {
        name: parameter.detach()
        for name, parameter in decoder.named_parameters()
        if name in decoder.whole or (parameter.requires_grad and ".lora_" not in name)
    }
    save_file(_cast(whole, dtype), directory / "trained.safetensors")
    base = os.path.relpath(decoder.lora_base.resolve(), directory.resolve())
    write_text(directory / "decoder.json", json.dumps({"format": 1, "base": base}, indent=1))


def load_decoder(
    directory: str | Path, base: str | Path | None = None, dtype: torch.dtype = torch.float32
) -> AnimationDecoder:
    """Reads what ``save_decoder`` wrote.

    Args:
        directory: the saved decoder.
        base: the video base, where LoRA was saved and the base has moved.
        dtype: of the weights.

    Raises:
        CheckpointError: a file is missing, damaged or of another model; nothing is loaded in part.
    """
    directory = Path(directory)
    about = directory / "decoder.json"
    if not about.is_file():
        # The table of positions is a float64 buffer, which loading leaves as it is.
        return load_model(AnimationDecoder, directory, torch_dtype=dtype).to(dtype)
    from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict

    try:
        sizes = AnimationDecoder.load_config(directory)
        settings: Any = PeftConfig.from_pretrained(str(directory / "adapter"))
        adapter = load_file(directory / "adapter/adapter_model.safetensors")
        whole = load_file(directory / "trained.safetensors")
        found = Path(base or directory / json.loads(about.read_text(encoding="utf-8"))["base"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: not a whole saved decoder ({error})") from error
    decoder = AnimationDecoder.from_base(
        found,
        sizes["max_text_seq_length"],
        sizes["motion_scope"],
        sizes["motion_scope_hidden"],
        sizes["sample_frames"],
        dtype,
    )
    add_lora(decoder, LoraConfig(settings.r, settings.lora_alpha, settings.lora_dropout), found)
    adapter = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in adapter.items()}
    own = dict(decoder.named_parameters())
    _check(directory / "adapter", adapter, get_peft_model_state_dict(decoder), all_of=True)
    _check(directory / "trained.safetensors", whole, own, all_of=False)
    set_peft_model_state_dict(decoder, adapter)
    decoder.load_state_dict(whole, strict=False)
    decoder.whole = frozenset(whole)
    # PEFT makes its own weights in float32; the table of positions is a float64 buffer.
    return decoder.to(dtype)


def _check(path: Path, found: dict[str, Any], own: dict[str, Any], *, all_of: bool) -> None:
    missing = set(own) - set(found) if all_of else set()
    for what, names in (("missing", missing), ("unexpected", set(found) - set(own))):
        if names:
            raise CheckpointError(f"{path}: weight {sorted(names)[0]} is {what}")
    for name, tensor in found.items():
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"{path}: {name} is {tuple(tensor.shape)}, the base needs {tuple(own[name].shape)}"
            )


def _cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    return {k: v.detach().to("cpu", dtype or v.dtype).contiguous() for k, v in tensors.items()}
