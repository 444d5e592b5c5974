"""Parts of several training runs to one public checkpoint: float16, checked, small."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from animegamer.atomic import write_text
from animegamer.checkpoint import exported, fingerprint, load_model
from animegamer.config import MODEL_SECTIONS, Config, to_tree
from animegamer.models.decoder_files import load_decoder, save_decoder
from animegamer.models.encoder import ActionAwareEncoder
from animegamer.models.mllm import NextStateMLLM


def write_parts(
    config: Config, directory: Path, networks: dict[str, str], vocabulary: dict[str, Any] | None
) -> dict[str, str]:
    """Writes every part of a checkpoint, in the place of those that are there.

    Args:
        config: its ``assemble`` names the runs, its ``backbones`` what is copied.
        directory: where to; ``assemble.output`` is where it will lie in the end.
        networks: fingerprints of the frozen networks that the runs must have been trained on.
        vocabulary: content of ``vocabulary.json``, or None where there is none.

    Returns:
        Path of each part in the directory, and where it came from.

    Raises:
        CheckpointError: if a run has no weights.
        ValueError: if a part was trained on another encoder, MLLM or frozen network than is
            gathered here.
    """
    assemble, tree, origins = config.assemble, to_tree(config), {}
    for name in assemble.backbones:
        source, part = tree["backbones"][name], f"backbones/{name}"
        shutil.rmtree(directory / part, ignore_errors=True)
        shutil.copytree(source, directory / part)
        tree["backbones"][name] = (Path(assemble.output) / part).as_posix()
        origins[part] = source
    runs = {
        part: exported(getattr(assemble, part)) / part for part in ("encoder", "decoder", "mllm")
    }
    parents = {
        "encoder": networks,
        "decoder": {**networks, "mllm": fingerprint(runs["mllm"])},
        "mllm": {**networks, "init": fingerprint(runs["encoder"])},
    }
    for part, weights in runs.items():
        origins[part] = _origin(part, weights.parent, parents[part])
        shutil.rmtree(directory / part, ignore_errors=True)
    shipped, base = directory / "backbones/language_base", Path(config.backbones.language_base)
    _write_networks(runs, directory, shipped if shipped.is_dir() else base)
    for file in directory.rglob("config.json"):
        settings = json.loads(file.read_text(encoding="utf-8"))
        if settings.pop("_name_or_path", None) is not None:  # a path of the machine that trained
            write_text(file, json.dumps(settings, indent=2) + "\n")
    sections = {name: tree[name] for name in MODEL_SECTIONS}
    write_text(directory / "config.yaml", yaml.safe_dump(sections, sort_keys=False))
    origins["config.yaml"] = "-"
    if vocabulary is not None:
        names = json.dumps(vocabulary, indent=1, ensure_ascii=False) + "\n"
        write_text(directory / "vocabulary.json", names)
        origins["vocabulary.json"] = "-"
    return origins


def _origin(part: str, weights: Path, parents: dict[str, str]) -> str:
    state_file = weights.parent / "state.json"
    if not state_file.is_file():
        return str(weights)
    state = json.loads(state_file.read_text(encoding="utf-8"))
    for name, expected in parents.items():
        if state["parents"].get(name, expected) != expected:
            name = "encoder" if name == "init" else name
            raise ValueError(
                f"{weights}: this {part} was trained on another {name} than the one gathered here; "
                f"name runs that belong together, or train the {part} again"
            )
    unfinished = "" if state["finished"] else ", unfinished"
    return f"{weights.parent.parent}, step {state['step']}{unfinished}"


def _write_networks(runs: dict[str, Path], directory: Path, base: Path) -> None:
    encoder = load_model(ActionAwareEncoder, runs["encoder"]).float().eval()
    null = encoder.null().half().contiguous()
    encoder.half().save_pretrained(directory / "encoder")
    save_decoder(load_decoder(runs["decoder"], dtype=torch.float16), directory / "decoder")
    save_file({"s_a_null": null}, directory / "decoder" / "null.safetensors")
    # LoRA stands on the base; an MLLM that trained whole needs none.
    mllm = NextStateMLLM.from_pretrained(
        runs["mllm"], base=base if base.is_dir() else None, dtype=torch.float16
    )
    mllm.save_pretrained(directory / "mllm", dtype=torch.float16)


def size_table(directory: Path, parts: dict[str, str], largest: int, largest_file: int) -> str:
    """Sizes of the parts, their origins and the total, as text.

    Args:
        directory: of the checkpoint.
        parts: from ``write_parts``.
        largest: bytes that all parts may have together; 0 sets no limit.
        largest_file: bytes that one file may have; 0 sets no limit.

    Raises:
        ValueError: if it is larger, or holds weights that are not float16.
    """
    rows, total, wrong = [], 0, []
    for part, origin in parts.items():
        path = directory / part
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
        size = sum(file.stat().st_size for file in files)
        total += size
        rows.append(f"{part:26s} {size / 1e6:8.2f} MB  {origin}")
        for file in files:
            name = file.relative_to(directory)
            if largest_file and file.stat().st_size > largest_file:
                wrong.append(f"{name} is larger than {largest_file / 1e6:g} MB")
            if file.suffix == ".safetensors" and (wide := _types(file) & {"F32", "F64", "BF16"}):
                wrong.append(f"{name} holds {', '.join(sorted(wide))}, expected F16")
    table = "\n".join([*rows, f"{'total':26s} {total / 1e6:8.2f} MB"])
    if largest and total > largest:
        wrong.append(f"the parts are larger than {largest / 1e6:g} MB together")
    if wrong:
        raise ValueError("\n".join([f"nothing written: {'; '.join(wrong)}", table]))
    return table


def _types(file: Path) -> set[str]:
    with safe_open(file, "pt") as tensors:
        return {tensors.get_slice(key).get_dtype() for key in tensors.keys()}
