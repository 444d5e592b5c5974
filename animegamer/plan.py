"""Parameter counts and a memory plan of a run, before there are weights or GPUs.

Counts come from the models themselves, built on the meta device. Activations and gradients come
from a whole training step on fake tensors (``step_memory``); what a parallel layout makes of
weights, gradients and optimiser state is arithmetic, checked on one device and otherwise planned:

* ``ddp``: everything on every device, and the buckets in which gradients are averaged.
* ``fsdp``: float32 shards; two blocks, and what lies outside the blocks, gathered in the type of
  the mixed precision; gradients of two blocks before they are scattered.
* ``zero2``: 16-bit weights whole, their float32 copies and the optimiser sharded, DeepSpeed's
  buckets of 500 million numbers.
* ``zero3``: 16-bit weights sharded too; up to a billion of them gathered (DeepSpeed's default).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import nn

from animegamer.config import Config
from animegamer.models import skeleton
from animegamer.optimizer import build_optimizer
from animegamer.play_plan import parts, peaks
from animegamer.step_memory import Trace, trace_training
from animegamer.training import parameter_table, select_trainable

_BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size
_LIVE = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters
_TYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
GB = 1e9


def stage_of(config: Config) -> str:
    """``stage1``, ``stage2`` or ``stage3``, after what trains; ``play`` where nothing does."""
    tops = {pattern.partition(".")[0] for pattern in config.train.trainable}
    if not tops:
        return "play"
    if "mllm" in tops:
        return "stage2"
    return "stage1" if "encoder" in tops else "stage3"


def _numbers(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def counts(config: Config) -> dict[str, int]:
    """Numbers of parameters by what they belong to, all of them counted.

    Raises:
        ConfigError: if a backbone's sizes are not there.
    """
    with torch.device("meta"):
        encoder, decoder = skeleton.encoder_and_decoder(config)
        mllm = skeleton.mllm(config)
        others = {
            "video autoencoder": skeleton.autoencoder(config),
            "T5 encoder": skeleton.text_encoder(config),
            "CLIP image tower": skeleton.image_encoder(config),
        }
    projections = _numbers(mllm.input_projection.parameters())
    projections += _numbers(mllm.output_projection.parameters())
    llm = _numbers(mllm.llm.parameters())
    trained = _numbers(p for p in mllm.llm.parameters() if p.requires_grad)
    named = dict(decoder.named_parameters())
    lora = _numbers(p for name, p in named.items() if ".lora_" in name)
    return {
        "Mistral": llm,
        "Mistral, trained": trained,
        "MLLM (Mistral and projections)": llm + projections,
        "MLLM, trained": trained + projections,
        "encoder": _numbers(encoder.parameters()),
        "decoder, without LoRA": _numbers(named.values()) - lora,
        "decoder's LoRA": lora,
        "decoder's adaLN": _numbers(
            p for name, p in named.items() if re.search(r"\.norm[12]\.linear\.", name)
        ),
        **{name: _numbers(model.parameters()) for name, model in others.items()},
    }


@dataclass(frozen=True)
class Plan:
    """Bytes on one device; every device of a training holds the same.

    Attributes:
        weights: parameters and buffers.
        gradients: of all that trains, where they are all there.
        optimizer: moments, and float32 copies of 16-bit weights.
        average: the exponential moving average (``train.ema_decay``).
        communication: buckets, and what is gathered for a while.
        activations: most that a step holds beside all of the above: activations, temporary results,
            casts of weights.
        peak: most at one moment. Activations and gradients are not at their most together.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int
    communication: int
    activations: int
    peak: int


def build(config: Config) -> tuple[nn.Module, dict[str, list[str]]]:
    """What the stage trains, and the names of what trains in it, on torch's default device."""
    stage = stage_of(config)
    model: nn.Module
    if stage == "stage2":
        model = skeleton.state_model(config)
    else:
        model = skeleton.shot_model(config, with_encoder=stage == "stage1")
    return model, select_trainable(model, config.train.trainable)


def make_batch(config: Config, model: nn.Module) -> object:
    """The largest batch of the stage, on torch's default device."""
    make = skeleton.game_batch if stage_of(config) == "stage2" else skeleton.shot_batch
    return make(config, model)  # type: ignore[arg-type]


def plan_training(config: Config) -> Plan:
    """The plan of one device of a training run.

    Raises:
        ConfigError: if a backbone's sizes are not there.
        ValueError: if nothing trains.
    """
    autocast = _TYPES[config.train.precision]
    # Sharded layouts hold what they compute with in the type of the mixed precision.
    dtype = None if config.plan.layout == "ddp" else autocast
    with torch.device("meta"):
        model, groups = build(config)
        batch = make_batch(config, model)
    trace = trace_training(
        model, batch, lambda: build_optimizer(config.train, model, groups), autocast, dtype
    )
    return _lay_out(config, model, trace, dtype)


def _lay_out(config: Config, model: nn.Module, trace: Trace, dtype: torch.dtype | None) -> Plan:
    layout, devices = config.plan.layout, config.plan.devices
    size = 4 if dtype is None else dtype.itemsize  # bytes of a number that is computed with
    total = _numbers(model.parameters()) + _numbers(model.buffers())
    trained = _numbers(p for p in model.parameters() if p.requires_grad)
    average = 4 * trained if config.train.ema_decay else 0
    moments = trace.optimizer * 4 // size  # always float32
    if layout == "ddp":
        weights, gradients, optimizer = 4 * total, 4 * trained, moments
        communication = 4 * trained if devices > 1 else 0
        share = 1.0
    elif layout == "fsdp":
        weights, gradients = 4 * total // devices, 4 * trained // devices
        optimizer, average = moments // devices, average // devices
        root, block, block_trained = _blocks(model)
        communication = size * (root + 2 * block + 2 * block_trained) if devices > 1 else 0
        share = 4 / size / devices
    else:
        shards = devices if layout == "zero3" else 1
        weights, gradients = size * total // shards, size * trained // devices
        copies = 4 * trained if size < 4 else 0
        optimizer, average = (moments + copies) // devices, average // devices
        communication = 2 * size * min(trained, _BUCKET)
        if layout == "zero3":
            communication += size * min(total, _LIVE)
        share = 1 / devices
    held = weights + optimizer + average + communication
    peak = held + max(trace.peak(share), gradients + trace.optimizer_work)
    working = int(trace.working.max())
    return Plan(weights, gradients, optimizer, average, communication, working, peak)


def _blocks(model: nn.Module) -> tuple[int, int, int]:
    """Parameters outside the repeated blocks, in the largest block, and of those that train."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=lambda module: _numbers(module.parameters()))
    root = _numbers(model.parameters()) - _numbers(blocks.parameters())
    largest = max(blocks, key=lambda block: _numbers(block.parameters()))
    return (
        root,
        _numbers(largest.parameters()),
        _numbers(p for p in largest.parameters() if p.requires_grad),
    )


def report(config: Config) -> str:
    """Counts and plan as text; see ``scripts/plan.py``."""
    lines = ["Parameters", *_count_lines(counts(config)), ""]
    if stage_of(config) == "play":
        return "\n".join([*lines, *_play_lines(config)])
    with torch.device("meta"):
        model, groups = build(config)
    lines += ["What trains (train.trainable)", parameter_table(model, groups), ""]
    plan, about, stage = plan_training(config), config.plan, stage_of(config)
    what = "games" if stage == "stage2" else "shots"
    settings = config.mllm if stage == "stage2" else config.decoder
    lines += [
        f"Memory of each of {about.devices} devices in {stage}: {about.layout}, "
        f"{config.train.batch_size} {what} a device, precision {config.train.precision}, "
        f"gradient checkpointing {'on' if settings.gradient_checkpointing else 'off'}",
        *(f"{f.name:32s} {getattr(plan, f.name) / GB:>15.2f} GB" for f in fields(plan)),
    ]
    spare = about.device_memory - plan.peak / GB
    lines.append(
        f"planned, not measured: {'fits' if spare >= 0 else 'does not fit'} "
        f"{about.device_memory:g} GB by {abs(spare):.1f} GB"
    )
    return "\n".join(lines)


def _play_lines(config: Config) -> list[str]:
    found = parts(config)
    lines = ["Memory in play, planned and not measured; GB are 1e9 bytes"]
    for part in found:
        note = f", of which {part.streamed / GB:.2f} at a time" if part.kind == "layers" else ""
        lines.append(
            f"{part.name:32s} {part.weights / GB:>15.2f} GB{note}, {part.kind} on {part.device}; "
            f"a pass takes {part.working / GB:.2f} GB more"
        )
    lines.append("")
    return lines + [f"{'peak, ' + k:32s} {v / GB:>15.2f} GB" for k, v in peaks(found).items()]


def _count_lines(found: dict[str, int]) -> list[str]:
    lines = []
    for name, count in found.items():
        if not name.endswith(", trained"):
            trained = found.get(f"{name.partition(' (')[0]}, trained")
            note = f", of which {trained:,} train" if trained is not None else ""
            lines.append(f"{name:32s} {count:>15,}{note}")
    return lines
