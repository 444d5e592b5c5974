"""The authors' MLLM file (``pytorch_model.bin``) to an MLLM of ours and the Mistral under it.

Their file holds a PEFT-wrapped Mistral and two projections. Head counts, rotary base and tokenizer
are not in it: they come from the directory of the Mistral that it was trained on
(``backbones.language_base``; its weights are not read). Embeddings and ``lm_head`` were trained
whole, so the base that is written has the trained ones, as the adapter does.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM

from animegamer.atomic import write_text
from animegamer.checkpoint import CheckpointError
from animegamer.config import LoraConfig, MllmConfig
from animegamer.convert.table import Converted, KeyTable, Row, convert
from animegamer.convert.tensors import (
    SHARD_BYTES,
    LazyTensor,
    TorchFile,
    merge_lora,
    read_safetensors,
    write_safetensors,
)
from animegamer.language import add_special_tokens, load_tokenizer
from animegamer.models.decoder_files import PEFT_PREFIX
from animegamer.models.mistral import TARGETS, lora_settings, read_json
from animegamer.models.mllm_files import FORMAT

_THEIRS = "llm.base_model.model."
_LAYER = f"{_THEIRS}model.layers.{{n}}."
_OURS = "model.layers.{n}."
_LINEAR = tuple(f"{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}" for name in TARGETS)
_NORMS = ("input_layernorm", "post_attention_layernorm")


def _norm(theirs: str, ours: str) -> tuple[Row, Row]:
    return (
        Row(f"{_THEIRS}{theirs}.original_module.weight", (f"base/{ours}.weight",)),
        Row(
            f"{_THEIRS}{theirs}.modules_to_save.default.weight",
            (f"adapter/{PEFT_PREFIX}{ours}.weight",),
        ),
    )


def _rows() -> list[Row]:
    rows = [
        Row("input_resampler.proj.{i}.{p}", ("projections/input_projection.{i}.{p}",)),
        Row("output_resampler.proj.{i}.{p}", ("projections/output_projection.{i}.{p}",)),
        *(
            Row(f"{_THEIRS}{name}.weight", (f"adapter/{PEFT_PREFIX}{name}.weight",))
            for name in ("model.embed_tokens", "lm_head")
        ),
        *_norm("model.norm", "model.norm"),
    ]
    for name in _NORMS:
        rows += _norm(f"model.layers.{{n}}.{name}", f"{_OURS}{name}")
    for name in _LINEAR:
        rows.append(Row(f"{_LAYER}{name}.base_layer.weight", (f"base/{_OURS}{name}.weight",)))
        rows += [
            Row(
                f"{_LAYER}{name}.lora_{matrix}.default.weight",
                (f"adapter/{PEFT_PREFIX}{_OURS}{name}.lora_{matrix}.weight",),
            )
            for matrix in "AB"
        ]
    frequencies = ("model.rotary_emb.inv_freq", "model.layers.{n}.self_attn.rotary_emb.inv_freq")
    rows += [Row(f"{_THEIRS}{name}", reason="computed from the sizes") for name in frequencies]
    return rows


TABLE = KeyTable(_rows(), "released MLLM (PEFT-wrapped Mistral with projections)")
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What an MLLM file tells by its tensors.

    Attributes:
        mistral: configuration of the Mistral, its head counts from ``backbones.language_base``.
        rank: of the LoRA.
        width: D of s_a.
        inner: width inside the projection in.
    """

    mistral: MistralConfig
    rank: int
    width: int
    inner: int


def plan(source: TorchFile, language_base: str | Path) -> tuple[Converted, Sizes]:
    """Sorts and checks an MLLM file.

    Args:
        source: the file.
        language_base: directory of the Mistral it was trained on; its ``config.json`` is read.

    Returns:
        Our tensors in ``base``, ``adapter`` and ``projections``; the sizes.

    Raises:
        CheckpointError: names the key that is unknown, missing or of another size.
        FileNotFoundError: there is no ``config.json``.
    """
    found = convert(source, TABLE)
    linear = "model.layers.0.mlp.gate_proj"
    intermediate, hidden = found.shape("base", f"{linear}.weight", 2)
    rank, _ = found.shape("adapter", f"{PEFT_PREFIX}{linear}.lora_A.weight", 2)
    vocabulary, _ = found.shape("adapter", f"{PEFT_PREFIX}{EMBEDDINGS[0]}", 2)
    inner, width = found.shape("projections", "input_projection.0.weight", 2)
    layers = {
        int(match[1])
        for name in found["base"]
        if (match := re.match(r"model\.layers\.(\d+)\.", name))
    }
    mistral = _mistral(Path(language_base), found, hidden, intermediate, max(layers) + 1)
    mistral.vocab_size = vocabulary
    for name in EMBEDDINGS:
        if (tensor := found["adapter"].get(PEFT_PREFIX + name)) is not None:
            found.files["base"][name] = tensor
            found.keys[f"base/{name}"] = found.keys[f"adapter/{PEFT_PREFIX}{name}"]
    _check_rank(found, rank)
    with torch.device("meta"):
        whole = MistralForCausalLM(mistral)
    shapes = {name: tuple(p.shape) for name, p in whole.state_dict().items()}
    found.expect("adapter", _adapter_shapes(shapes, rank))
    found.expect("base", shapes)
    found.expect(
        "projections",
        {
            f"{side}_projection.{name}": shape
            for side, (a, b, c) in (
                ("input", (width, inner, hidden)),
                ("output", (hidden, width, width)),
            )
            for name, shape in (
                ("0.weight", (b, a)),
                ("0.bias", (b,)),
                ("2.weight", (c, b)),
                ("2.bias", (c,)),
            )
        },
    )
    return found, Sizes(mistral, rank, width, inner)


def _mistral(
    base: Path, found: Converted, hidden: int, intermediate: int, layers: int
) -> MistralConfig:
    place = base / "config.json"
    settings = read_json(place)
    if settings.get("model_type") != "mistral":
        raise CheckpointError(
            f"{place}: model_type is {settings.get('model_type')!r}, expected 'mistral'"
        )
    mistral = MistralConfig.from_dict(settings)
    head = mistral.head_dim or mistral.hidden_size // mistral.num_attention_heads
    queries, _ = found.shape("base", "model.layers.0.self_attn.q_proj.weight", 2)
    keys, _ = found.shape("base", "model.layers.0.self_attn.k_proj.weight", 2)
    for name, theirs in (
        ("hidden_size", hidden),
        ("intermediate_size", intermediate),
        ("num_hidden_layers", layers),
        ("num_attention_heads", queries // head),
        ("num_key_value_heads", keys // head),
    ):
        if getattr(mistral, name) != theirs:
            raise CheckpointError(
                f"{found.source.path} has {name} {theirs}, but {place} says "
                f"{getattr(mistral, name)}: set backbones.language_base to the Mistral that this "
                "MLLM was trained on"
            )
    return mistral


def _check_rank(found: Converted, rank: int) -> None:
    for name, tensor in found["adapter"].items():
        if ".lora_" in name:
            found.shape("adapter", name, 2)
            own = tensor.shape[0 if ".lora_A." in name else -1]
            if own != rank:
                raise CheckpointError(
                    f"{found.source.path}: key {found.keys[f'adapter/{name}']} has LoRA rank "
                    f"{own}, other layers have rank {rank}; expected one rank"
                )


def _adapter_shapes(shapes: dict[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(TARGETS)):
            result[f"{PEFT_PREFIX}{module}.lora_A.weight"] = (rank, shape[1])
            result[f"{PEFT_PREFIX}{module}.lora_B.weight"] = (shape[0], rank)
        else:
            result[PEFT_PREFIX + name] = shape
    return result


def game_tokenizer(found: Converted, language_base: str | Path, tokens: int) -> Any:
    """The tokenizer of the Mistral, with the game's own tokens.

    Args:
        found: from ``plan``.
        language_base: directory of the Mistral.
        tokens: N; there are as many slots as the next power of two holds (release: 256 for 226).

    Raises:
        CheckpointError: if it has another size than the file's embeddings.
        FileNotFoundError: if there is none.
    """
    tokenizer = load_tokenizer(language_base)
    add_special_tokens(tokenizer, 1 << (tokens - 1).bit_length())
    vocabulary = found["adapter"][PEFT_PREFIX + EMBEDDINGS[0]].shape[0]
    if len(tokenizer) != vocabulary:
        raise CheckpointError(
            f"{found.source.path}: key {_THEIRS}{EMBEDDINGS[0]} has {vocabulary} rows, but the "
            f"tokenizer in {language_base} has {len(tokenizer)} tokens with the game's own for "
            f"{tokens} tokens of s_a: set backbones.language_base, text_tokens and visual_tokens "
            "to those that this MLLM was trained with"
        )
    return tokenizer


def write(
    found: Converted,
    sizes: Sizes,
    tokenizer: Any,
    lora: LoraConfig,
    tokens: int,
    checkpoint: Path,
    *,
    merge: bool,
) -> None:
    """Writes ``mllm`` and, with LoRA kept, ``backbones/language_base``.

    Args:
        found: from ``plan``.
        sizes: from ``plan``.
        tokenizer: from ``game_tokenizer``.
        lora: rank and alpha.
        tokens: N.
        checkpoint: directory of the whole checkpoint.
        merge: fold the LoRA into the Mistral, which then lies in ``mllm/language_model``.
    """
    directory = checkpoint / "mllm"
    inner = None if sizes.inner == sizes.mistral.hidden_size else sizes.inner
    about: dict[str, Any] = {
        "format": FORMAT,
        "num_tokens": tokens,
        "width": sizes.width,
        "vocabulary": sizes.mistral.vocab_size,
        "base": None if merge else "../backbones/language_base",
        "mllm": dataclasses.asdict(
            MllmConfig(LoraConfig() if merge else lora, projection_hidden=inner)
        ),
    }
    if merge:
        weights = merge_lora(found["base"], found["adapter"], lora.alpha / lora.rank)
        write_mistral(directory / "language_model", sizes.mistral, weights)
    else:
        base = checkpoint / "backbones" / "language_base"
        write_mistral(base, sizes.mistral, found["base"])
        tokenizer.save_pretrained(str(base))
        write_safetensors(directory / "adapter", "adapter_model", found["adapter"])
        settings = lora_settings(lora)
        settings.inference_mode, settings.base_model_name_or_path = True, about["base"]
        settings.save_pretrained(str(directory / "adapter"))
    write_safetensors(directory, "projections", found["projections"])
    tokenizer.save_pretrained(str(directory / "tokenizer"))
    write_text(directory / "mllm.json", json.dumps(about, indent=2) + "\n")


def write_mistral(directory: Path, mistral: MistralConfig, weights: dict[str, LazyTensor]) -> None:
    """Writes a Mistral as transformers reads it."""
    settings = mistral.to_dict() | {
        "architectures": ["MistralForCausalLM"],
        "dtype": str(weights["lm_head.weight"].dtype).removeprefix("torch."),
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "config.json", json.dumps(settings, indent=2) + "\n")
    write_safetensors(directory, "model", weights, SHARD_BYTES)


def read(
    directory: Path, language_base: Path
) -> tuple[dict[str, dict[str, LazyTensor]], dict[str, Any], float]:
    """Maps the MLLM of one of our checkpoints, whoever made it.

    Args:
        directory: as ``NextStateMLLM.save_pretrained`` writes it.
        language_base: where the base lies if it is not where the directory says.

    Returns:
        ``base``, ``adapter`` (empty if it has none) and ``projections``; the configuration of the
        Mistral; the adapter's alpha / rank.

    Raises:
        CheckpointError: if a file is missing or damaged.
        FileNotFoundError: if the base is missing.
    """
    about = read_json(directory / "mllm.json")
    projections = read_safetensors(directory, "projections")
    if about.get("base") is None:
        place = directory / "language_model"
        files = {"base": read_safetensors(place, "model"), "adapter": {}}
        return files | {"projections": projections}, read_json(place / "config.json"), 0.0
    place = directory / str(about["base"])
    place = place if (place / "config.json").is_file() else language_base
    lora = about["mllm"]["lora"]
    files = {
        "base": read_safetensors(place, "model"),
        "adapter": read_safetensors(directory / "adapter", "adapter_model"),
    }
    mistral = read_json(place / "config.json") | {"vocab_size": about["vocabulary"]}
    return files | {"projections": projections}, mistral, lora["alpha"] / lora["rank"]
