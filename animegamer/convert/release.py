"""The authors' whole release to a checkpoint of ours, and back.

A checkpoint made with LoRA kept goes back with every key and tensor equal: ``release.json`` tells
how the files were named and wrapped, ``release_extras.safetensors`` holds what no network uses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from animegamer.atomic import write_text
from animegamer.checkpoint import CheckpointError, replace_directory
from animegamer.config import MODEL_SECTIONS, Config, LoraConfig, to_tree
from animegamer.convert import autoencoder, decoder, mllm
from animegamer.convert.table import Converted, KeyTable, restore
from animegamer.convert.tensors import (
    LazyTensor,
    Tensors,
    read_safetensors,
    read_torch,
    write_safetensors,
    write_torch,
)

FORMAT = 1
_EXTRAS = "release_extras"
_ABOUT = "release.json"
_ONE_WAY = (
    "LoRA is merged: this checkpoint cannot be converted back; convert again without merging for "
    "that"
)


@dataclass(frozen=True)
class ReleaseFiles:
    """The authors' files; None is not converted.

    Attributes:
        mllm: ``pytorch_model.bin``.
        decoder: ``mp_rank_00_model_states.pt``; holds the action-aware encoder, too.
        autoencoder: ``3d-vae.pt``.
    """

    mllm: str | Path | None = None
    decoder: str | Path | None = None
    autoencoder: str | Path | None = None


@dataclass
class _Plan:
    """What is going to be written; parts that are not converted are None."""

    found: dict[str, Converted]
    tokens: int
    mllm: mllm.Sizes | None = None
    tokenizer: Any = None
    mllm_lora: LoraConfig | None = None
    decoder: dict[str, Any] | None = None
    decoder_lora: LoraConfig | None = None
    autoencoder: dict[str, Any] | None = None


def from_release(
    files: ReleaseFiles, output: str | Path, config: Config, *, merge: bool = False
) -> str:
    """Converts the authors' files; nothing is written unless all of them can be.

    Args:
        files: at least one.
        output: the new checkpoint; it must not exist.
        config: gives what the files do not tell: ``backbones.language_base`` (head counts and
            tokenizer), ``text_tokens``, ``visual_tokens``, and the LoRAs' alpha.
        merge: fold LoRA into the networks. This is one-way.

    Returns:
        A report of counts.

    Raises:
        FileNotFoundError: if a file is missing.
        CheckpointError: names the file or key that is wrong, and what was expected.
    """
    output = Path(output)
    if output.exists():
        raise CheckpointError(f"{output} is there already: name a new directory")
    plan = _plan(files, config)

    def write(temporary: Path) -> None:
        if plan.mllm is not None and plan.mllm_lora is not None:
            mllm.write(
                plan.found["mllm"],
                plan.mllm,
                plan.tokenizer,
                plan.mllm_lora,
                plan.tokens,
                temporary,
                merge=merge,
            )
        if plan.decoder is not None and plan.decoder_lora is not None:
            found = plan.found["decoder"]
            decoder.write(found, plan.decoder, plan.decoder_lora, config, temporary, merge=merge)
        if plan.autoencoder is not None:
            directory = temporary / "backbones" / "autoencoder"
            autoencoder.write(plan.found["autoencoder"], plan.autoencoder, directory)
        settings = _settings(plan, config, output, merge)
        sections = {name: settings[name] for name in MODEL_SECTIONS}
        write_text(temporary / "config.yaml", yaml.safe_dump(sections, sort_keys=False))
        _write_rest(plan, temporary, merge)

    replace_directory(output, write)
    loras = {"mllm": plan.mllm_lora, "decoder": plan.decoder_lora}
    lines = [_line(found, loras.get(part)) for part, found in plan.found.items()]
    return "\n".join([_HEAD, *lines, *([_ONE_WAY] if merge else [])])


def _plan(files: ReleaseFiles, config: Config) -> _Plan:
    sources = {
        field.name: read_torch(path)
        for field in fields(files)
        if (path := getattr(files, field.name)) is not None
    }
    if not sources:
        raise CheckpointError("no file of the release is named: expected at least one")
    backbones = config.backbones
    plan = _Plan({}, backbones.text_tokens + backbones.visual_tokens)
    if "mllm" in sources:
        found, plan.mllm = mllm.plan(sources["mllm"], backbones.language_base)
        plan.tokenizer = mllm.game_tokenizer(found, backbones.language_base, plan.tokens)
        plan.found["mllm"] = found
        plan.mllm_lora = _lora(found, "mllm", config.mllm.lora, plan.mllm.rank)
    if "decoder" in sources:
        found, plan.decoder, rank = decoder.plan(sources["decoder"])
        if plan.decoder["max_text_seq_length"] != plan.tokens:
            raise CheckpointError(
                f"{found.source.path}: s_a has {plan.decoder['max_text_seq_length']} tokens (key "
                f"{decoder.POSITIONS}), but backbones.text_tokens is {backbones.text_tokens} and "
                f"backbones.visual_tokens {backbones.visual_tokens} in the configuration: expected "
                "them to add up to it"
            )
        plan.found["decoder"] = found
        plan.decoder_lora = _lora(found, "decoder", config.decoder.lora, rank)
    if "autoencoder" in sources:
        found, plan.autoencoder = autoencoder.plan(sources["autoencoder"])
        plan.found["autoencoder"] = found
    _check_fit(plan)
    return plan


def _lora(found: Converted, part: str, given: LoraConfig, rank: int) -> LoraConfig:
    """The rank is the file's; alpha is not in it, so the configuration must mean the same LoRA."""
    if rank and rank != given.rank:
        raise CheckpointError(
            f"{found.source.path} has LoRA rank {rank}, the configuration says {part}.lora.rank "
            f"{given.rank} and {part}.lora.alpha {given.alpha:g}. The file does not tell alpha: "
            f"set {part}.lora.rank={rank} and {part}.lora.alpha to what it was trained with"
        )
    return given if rank else LoraConfig()


def _check_fit(plan: _Plan) -> None:
    if plan.decoder is not None and plan.mllm is not None:
        width = plan.decoder["num_attention_heads"] * plan.decoder["attention_head_dim"]
        if plan.mllm.width != width:
            raise CheckpointError(
                f"{plan.found['mllm'].source.path} predicts s_a of width {plan.mllm.width}, "
                f"{plan.found['decoder'].source.path} takes {width}: expected files of one release"
            )
    if plan.decoder is not None and plan.autoencoder is not None:
        ours, theirs = plan.decoder["in_channels"], plan.autoencoder["latent_channels"]
        if ours != theirs:
            raise CheckpointError(
                f"{plan.found['decoder'].source.path} has latents of {ours} channels, "
                f"{plan.found['autoencoder'].source.path} of {theirs}: expected files of one "
                "release"
            )


def _settings(plan: _Plan, config: Config, output: Path, merge: bool) -> dict[str, Any]:
    """The model part of the configuration, sizes as read from the files."""
    paths: dict[str, Any] = {}
    if plan.mllm is not None and plan.mllm_lora is not None:
        inner = None if plan.mllm.inner == plan.mllm.mistral.hidden_size else plan.mllm.inner
        lora = LoraConfig() if merge else plan.mllm_lora
        config = replace(config, mllm=replace(config.mllm, lora=lora, projection_hidden=inner))
        if not merge:
            paths["language_base"] = (output / "backbones/language_base").as_posix()
    if plan.decoder is not None and plan.decoder_lora is not None:
        sizes = plan.decoder
        # Release: the autoencoder halves height and width three times.
        levels = len(plan.autoencoder["block_out_channels"]) if plan.autoencoder else 4
        shot = replace(
            config.shot,
            frames=sizes["sample_frames"],
            height=sizes["sample_height"] * 2 ** (levels - 1),
            width=sizes["sample_width"] * 2 ** (levels - 1),
        )
        settings = replace(
            config.decoder,
            motion_scope=True,
            motion_scope_hidden=sizes["motion_scope_hidden"],
            lora=LoraConfig() if merge else plan.decoder_lora,
        )
        encoder = replace(config.encoder, variant="concat", visual_positions=False)
        config = replace(config, shot=shot, decoder=settings, encoder=encoder)
        if plan.decoder_lora.rank and not merge:
            paths["video_base"] = (output / "backbones/video_base").as_posix()
    if plan.autoencoder is not None:
        paths["autoencoder"] = (output / "backbones/autoencoder").as_posix()
    return to_tree(replace(config, backbones=replace(config.backbones, **paths)))


def _write_rest(plan: _Plan, directory: Path, merge: bool) -> None:
    """What the way back needs."""
    about: dict[str, Any] = {"format": FORMAT, "merged": merge, "files": {}}
    extras: dict[str, LazyTensor] = {}
    for part, found in plan.found.items():
        source = found.source
        about["files"][part] = {
            "name": source.path.name,
            "container": source.container,
            "beside": source.beside,
            "keys": len(source.tensors),
        }
        if part == "autoencoder":
            engine = next(iter(found.keys.values())).startswith(autoencoder.ENGINE)
            about["files"][part]["prefix"] = autoencoder.ENGINE if engine else ""
        extras |= {f"{part}/{key}": tensor for key, tensor in found.extras.items()}
    write_text(directory / _ABOUT, json.dumps(about, indent=1) + "\n")
    if not merge:
        write_safetensors(directory, _EXTRAS, extras)


_HEAD = f"{'file':32s} {'keys':>6s} {'used':>6s} {'unused':>6s} {'ours':>6s} {'parameters':>15s}"


def _line(found: Converted, lora: LoraConfig | None) -> str:
    source = found.source
    keys, unused = len(source.tensors), len(found.extras)
    ours = sum(len(tensors) for tensors in found.files.values())
    count = sum(tensor.numel for tensor in source.tensors.values())
    lines = [
        f"{source.path.name:32s} {keys:6d} {keys - unused:6d} {unused:6d} {ours:6d} {count:15,d}",
        *(f"  {number} unused: {reason}" for reason, number in sorted(found.reasons.items())),
    ]
    if lora is not None and lora.rank:
        lines.append(f"  LoRA rank {lora.rank}; alpha {lora.alpha:g} by the configuration")
    if source.ignored:
        lines.append(f"  left out, not weights: {', '.join(source.ignored)}")
    return "\n".join(lines)


def to_release(checkpoint: str | Path, output: str | Path) -> str:
    """Converts a checkpoint that ``from_release`` made back to the authors' files.

    The networks may have been trained on since.

    Args:
        checkpoint: with LoRA kept.
        output: directory of the files; it must not exist.

    Returns:
        A report of counts.

    Raises:
        CheckpointError: if the checkpoint was not made from the release or its LoRA is merged, or a
            file is missing or damaged.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    if output.exists():
        raise CheckpointError(f"{output} is there already: name a new directory")
    place = checkpoint / _ABOUT
    try:
        about = json.loads(place.read_text(encoding="utf-8"))
        files, merged = dict(about["files"]), bool(about["merged"])
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']!r}, expected {FORMAT}")
    except FileNotFoundError:
        raise CheckpointError(
            f"no {place}: only a checkpoint that was converted from the release can be converted "
            "back"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{place}: damaged ({error}); convert the release again") from None
    if merged:
        raise CheckpointError(f"{checkpoint}: {_ONE_WAY}")
    extras = read_safetensors(checkpoint, _EXTRAS)
    made = {part: _restored(part, checkpoint, files[part], extras) for part in files}

    def write(temporary: Path) -> None:
        for part, tensors in made.items():
            entry = files[part]
            write_torch(temporary / entry["name"], tensors, entry["container"], entry["beside"])

    replace_directory(output, write)
    rows = [f"{files[part]['name']:32s} {len(tensors):6d}" for part, tensors in made.items()]
    return "\n".join([f"{'file':32s} {'keys':>6s}", *rows])


def _restored(
    part: str, checkpoint: Path, entry: dict[str, Any], extras: Tensors
) -> dict[str, LazyTensor]:
    table, tensors = _ours(part, checkpoint, entry)
    result = restore(table, tensors)
    own = {
        name.removeprefix(f"{part}/"): tensor
        for name, tensor in extras.items()
        if name.startswith(f"{part}/")
    }
    if len(result) + len(own) != entry["keys"] or result.keys() & own.keys():
        raise CheckpointError(
            f"{checkpoint}: {part} gives {len(result)} keys and {_EXTRAS}.safetensors {len(own)}, "
            f"expected {entry['keys']} together: a part is missing or of another model"
        )
    return result | own


def _ours(
    part: str, checkpoint: Path, entry: dict[str, Any]
) -> tuple[KeyTable, dict[str, dict[str, LazyTensor]]]:
    if part == "mllm":
        files, _, _ = mllm.read(checkpoint / "mllm", checkpoint / "backbones/language_base")
        for name in mllm.EMBEDDINGS:  # the adapter has them
            files["base"].pop(name, None)
        return mllm.TABLE, files
    if part == "decoder":
        files, _, _ = decoder.read(checkpoint / "decoder")
        files["encoder"] = read_safetensors(checkpoint / "encoder", decoder.STEM)
        return decoder.WITH_LORA if files["adapter"] else decoder.MERGED, files
    files = autoencoder.read(checkpoint / "backbones" / "autoencoder")
    ups = {name.split(".")[2] for name in files["autoencoder"] if ".up_blocks." in name}
    return autoencoder.key_table(len(ups), entry["prefix"]), files
