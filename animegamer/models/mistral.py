"""Stock Mistral as the MLLM uses it: strict loading, vocabulary, LoRA, the 4-D attention mask.

Axis letters: B batch, L sequence.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import MistralForCausalLM
from transformers.models.mistral.modeling_mistral import MistralModel

from animegamer.config import ConfigError, LoraConfig

Quantisation = Literal["plain", "int8", "nf4"]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
# transformers 5.24 renamed the argument; its old name goes in 5.40.
CACHE = "past_key_values"
if "cache" in inspect.signature(MistralModel.forward).parameters:
    CACHE = "cache"


def quantisation(weights: Quantisation, dtype: torch.dtype, device: str) -> dict[str, Any] | None:
    """How ``from_pretrained`` is told to quantise linear layers, or None for plain weights.

    Args:
        weights: ``int8`` (bitsandbytes' LLM.int8) or ``nf4`` (4-bit normal floats).
        dtype: that nf4 computes in.
        device: where the layers go.

    Raises:
        ConfigError: if there is no GPU, or bitsandbytes is not installed.
    """
    if weights == "plain":
        return None
    if torch.device(device).type != "cuda":
        raise ConfigError(
            f"play.memory.mllm_weights is {weights}, which needs a GPU, but the MLLM's device is "
            f"{device}: set play.device=cuda, or play.memory.mllm_weights=plain"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"play.memory.mllm_weights is {weights}, which needs the package bitsandbytes: "
            'pip install -e ".[quantised]", or set play.memory.mllm_weights=plain'
        )
    from transformers import BitsAndBytesConfig

    settings = (
        BitsAndBytesConfig(load_in_8bit=True)
        if weights == "int8"
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def load_mistral(
    directory: Path, dtype: torch.dtype, quantised: dict[str, Any] | None = None
) -> MistralForCausalLM:
    """Loads a Mistral directory, strictly, shard by shard and without a second copy.

    Args:
        directory: transformers layout.
        dtype: of the weights.
        quantised: from ``quantisation``.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if its files are damaged, incomplete or of another model.
    """
    settings = read_json(directory / "config.json")
    if settings.get("model_type") != "mistral":
        raise ValueError(
            f"{directory / 'config.json'}: model_type is {settings.get('model_type')!r}, expected "
            "'mistral'"
        )
    if not any(directory.glob("*.safetensors")):
        raise FileNotFoundError(f"no safetensors weights in {directory}")
    try:
        model, report = MistralForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            attn_implementation="sdpa",
            **(quantised or {}),
        )
    except (SafetensorError, RuntimeError, OSError) as error:
        raise ValueError(f"weights in {directory} cannot be read: {error}") from error
    check_names(directory, report["missing_keys"], report["unexpected_keys"])
    return model


def attention_mask(
    branch: torch.Tensor, query_turn: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The training mask, for training and play: causal but for the queries of a turn.

    A token sees what stands before it in branch 0 or in its own branch, and a query sees all
    queries of its turn. The mask is additive: under ``sdpa`` a boolean one would do as well, under
    ``eager`` it would be silently wrong.

    Args:
        branch: (B, L) int64, see ``language.Rendered``; -1 is padding.
        query_turn: (B, L) int64, the turn that a query belongs to, or -1.
        dtype: float type of the attention scores.

    Returns:
        (B, 1, L, L) of ``dtype``: 0 where the row's token sees the column's, else its minimum.
    """
    size = branch.shape[1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=branch.device).tril()
    shared = (branch == 0)[:, None, :] | (branch[:, :, None] == branch[:, None, :])
    together = (query_turn[:, :, None] == query_turn[:, None, :]) & (query_turn >= 0)[:, None, :]
    return additive((earlier & shared) | together, dtype)


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turns what rows see, (B, L, L) bool, into an additive mask (B, 1, L, L) of ``dtype``."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def lora_settings(lora: LoraConfig) -> Any:
    """PEFT's settings: LoRA on all linear layers, norms trained as copies (release)."""
    from peft import LoraConfig as PeftLora

    return PeftLora(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=TARGETS,
        modules_to_save=NORMS,
        task_type="CAUSAL_LM",
    )


def add_lora(llm: MistralForCausalLM, lora: LoraConfig) -> Any:
    """Wraps Mistral in a PEFT adapter: LoRA on all linear layers, norms trained as copies.

    Embeddings and ``lm_head`` are trained whole and in place (release). PEFT freezes them again
    whenever it wraps or loads, and does not save them by default.

    Returns:
        The ``PeftModel``.
    """
    from peft import get_peft_model

    model = get_peft_model(llm, lora_settings(lora))
    for layer in (llm.get_input_embeddings(), llm.get_output_embeddings()):
        layer.requires_grad_(True)
    return model


def score_dtype(embeddings: torch.Tensor) -> torch.dtype:
    """The type attention runs in: autocast casts queries and keys, and the mask must match."""
    kind = embeddings.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else embeddings.dtype


def grow_vocabulary(llm: MistralForCausalLM, size: int) -> None:
    """Grows the vocabulary in place; a base that has all tokens is left as it is.

    Release: new embeddings start at the mean of the old ones, new ``lm_head`` rows at three times
    the mean.

    Args:
        llm: Mistral, not wrapped.
        size: ids that the tokenizer has.
    """
    old = llm.config.vocab_size
    if size <= old:
        return
    llm.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        layers = (llm.get_input_embeddings(), 1.0), (llm.get_output_embeddings(), 3.0)
        for layer, factor in layers:
            weight = layer.weight
            weight[old:] = factor * weight[:old].float().mean(0).to(weight.dtype)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises FileNotFoundError or ValueError, naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: damaged or cut short: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def check_names(path: Path, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raises ValueError if weights are missing or unknown."""
    absent, foreign = sorted(missing), sorted(unexpected)
    if absent or foreign:
        raise ValueError(
            f"{path}: {len(absent)} weights are missing (such as {absent[:1]}) and {len(foreign)} "
            f"are unknown (such as {foreign[:1]}): not a checkpoint of this model"
        )
