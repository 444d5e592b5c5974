"""How an MLLM lies on disk: PEFT or transformers directories, safetensors, a readable JSON.

Nothing is unpickled, nothing is loaded in part: a missing, damaged or foreign file is an error that
names it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from animegamer.atomic import write_text
from animegamer.checkpoint import replace_directory
from animegamer.config import LoraConfig, MllmConfig
from animegamer.language import Language, load_tokenizer
from animegamer.models.mistral import add_lora, check_names, load_mistral, read_json

if TYPE_CHECKING:
    from animegamer.models.mllm import NextStateMLLM

FORMAT = 1
_ADAPTER = "adapter_model.safetensors"
_PROJECTIONS = "projections.safetensors"


def save(
    model: NextStateMLLM,
    directory: Path,
    *,
    dtype: torch.dtype | None,
    merge: bool,
    state_dict: Mapping[str, torch.Tensor] | None,
) -> None:
    """Writes a model; see ``NextStateMLLM.save_pretrained``."""
    weights = dict(model.state_dict() if state_dict is None else state_dict)
    llm = {k.removeprefix("llm."): v for k, v in weights.items() if k.startswith("llm.")}
    projections = {k: v for k, v in weights.items() if not k.startswith("llm.")}
    adapter = bool(model.config.lora.rank) and not merge
    base = _relative(model.base, directory) if adapter else None
    config = dataclasses.replace(model.config, lora=LoraConfig()) if merge else model.config
    about = {
        "format": FORMAT,
        "num_tokens": model.num_tokens,
        "width": model.width,
        "vocabulary": model.mistral.config.vocab_size,
        "base": base,
        "mllm": dataclasses.asdict(config),
    }

    def write(temporary: Path) -> None:
        _write_tensors(temporary / _PROJECTIONS, projections, dtype)
        if adapter:
            _save_adapter(model, temporary / "adapter", llm, base, dtype)
        else:
            _save_whole(model, temporary / "language_model", llm, dtype)
        model.language.tokenizer.save_pretrained(str(temporary / "tokenizer"))
        write_text(temporary / "mllm.json", json.dumps(about, indent=2) + "\n")

    replace_directory(directory, write)


def load(
    make: type[NextStateMLLM],
    directory: Path,
    *,
    base: str | Path | None,
    config: MllmConfig | None,
    dtype: torch.dtype,
    quantised: dict[str, Any] | None = None,
) -> NextStateMLLM:
    """Reads a model; see ``NextStateMLLM.from_pretrained``."""
    about = read_json(directory / "mllm.json")
    saved = _settings(directory / "mllm.json", about)
    if config is not None:
        for name, old, new in (
            ("lora.rank", saved.lora.rank, config.lora.rank),
            ("lora.alpha", saved.lora.alpha, config.lora.alpha if saved.lora.rank else None),
            ("projection_hidden", saved.projection_hidden, config.projection_hidden),
        ):
            if old != new and new is not None:
                raise ValueError(
                    f"{directory}: was trained with {name} {old}, the configuration says {new}"
                )
    config = config or saved
    base_directory = None
    if config.lora.rank:
        base_directory = _find_base(directory, about.get("base"), base)
        llm = load_mistral(base_directory, dtype, quantised)
        llm.resize_token_embeddings(about["vocabulary"], mean_resizing=False)
        wrapped = add_lora(llm, config.lora)
        _load_adapter(wrapped, directory / "adapter" / _ADAPTER)
    else:
        wrapped = load_mistral(directory / "language_model", dtype, quantised)
    tokenizer = load_tokenizer(directory / "tokenizer")
    language = Language(tokenizer, about["num_tokens"], config.max_turn_tokens)
    model = make(wrapped, language, config, about["width"], base_directory)
    for part in (model.input_projection, model.output_projection):
        part.to(dtype)
    projections = _read_tensors(directory / _PROJECTIONS)
    own = {k: v for k, v in model.state_dict().items() if not k.startswith("llm.")}
    check_names(directory / _PROJECTIONS, own.keys() - projections, projections.keys() - own)
    _check_shapes(directory / _PROJECTIONS, projections, own)
    model.load_state_dict(projections, strict=False)
    return model.eval()


def _settings(path: Path, about: Mapping[str, Any]) -> MllmConfig:
    if about.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {about.get('format')!r}, expected {FORMAT}")
    try:
        values = dict(about["mllm"])
        config = MllmConfig(**{**values, "lora": LoraConfig(**values["lora"])})
        for name in ("num_tokens", "width", "vocabulary"):
            int(about[name])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a saved MLLM: {error}") from error
    return config


def _save_adapter(
    model: NextStateMLLM,
    directory: Path,
    weights: Mapping[str, torch.Tensor],
    base: str | None,
    dtype: torch.dtype | None,
) -> None:
    from peft import get_peft_model_state_dict

    # save_embedding_layers: by default PEFT leaves out embeddings and lm_head without a word.
    tensors = get_peft_model_state_dict(
        model.llm, state_dict=dict(weights), save_embedding_layers=True
    )
    directory.mkdir()
    _write_tensors(directory / _ADAPTER, tensors, dtype)
    settings = copy.copy(model.llm.peft_config["default"])
    settings.inference_mode = True
    settings.base_model_name_or_path = base
    settings.save_pretrained(str(directory))


def _load_adapter(llm: Any, path: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    tensors = _read_tensors(path)
    own = get_peft_model_state_dict(llm, save_embedding_layers=True)
    check_names(path, own.keys() - tensors.keys(), tensors.keys() - own.keys())
    _check_shapes(path, tensors, own)
    result = set_peft_model_state_dict(llm, tensors)
    if result.unexpected_keys:
        raise ValueError(f"{path}: holds weights for no layer: {sorted(result.unexpected_keys)[0]}")


def _save_whole(
    model: NextStateMLLM,
    directory: Path,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
) -> None:
    llm = model.llm
    tensors = dict(weights)
    if model.config.lora.rank:
        llm = copy.deepcopy(llm)
        llm.load_state_dict(tensors)
        llm = llm.merge_and_unload()
        tensors = llm.state_dict()
    llm.save_pretrained(str(directory), state_dict=_cast(tensors, dtype))
    if dtype is not None:
        settings = read_json(directory / "config.json")
        settings["dtype"] = str(dtype).removeprefix("torch.")
        write_text(directory / "config.json", json.dumps(settings, indent=2) + "\n")


def _cast(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        for name, tensor in tensors.items()
    }


def _write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> None:
    safetensors.torch.save_file(_cast(tensors, dtype), path, metadata={"format": "pt"})


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"no weights {path}")
    try:
        return safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path}: damaged or cut short ({path.stat().st_size} bytes): {error}; copy or "
            "download it again"
        ) from error


def _check_shapes(
    path: Path, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise ValueError(
                f"{path}: {name} is {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
            )


def _relative(base: Path | None, directory: Path) -> str | None:
    if base is None:
        return None
    try:
        return Path(os.path.relpath(base.resolve(), directory.resolve())).as_posix()
    except ValueError:  # another drive
        return str(base)


def _find_base(directory: Path, recorded: str | None, given: str | Path | None) -> Path:
    if given is not None:
        return Path(given)
    if recorded is None or not (directory / recorded / "config.json").is_file():
        raise FileNotFoundError(
            f"{directory}: its language base {recorded!r} is not there (looked from that "
            "directory); pass base= with its place"
        )
    return Path(os.path.normpath(directory / recorded))
