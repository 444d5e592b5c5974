"""Seconds and memory of the networks at the configured size: a training step, a turn of play.

Weights are random, made on the device, and never written; inputs are the largest a batch can have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from animegamer import parallel
from animegamer.config import Config
from animegamer.drawing import ShotDrawer, ShotReader, precision
from animegamer.game import Instruction
from animegamer.models import skeleton
from animegamer.optimizer import build_optimizer
from animegamer.placement import Placement, placement
from animegamer.plan import build, make_batch, plan_training
from animegamer.play_plan import build_autoencoder, parts, peaks
from animegamer.session import GameSession
from animegamer.training import train_step
from benchmarks.report import GB, clock, peak, used

INSTRUCTION = Instruction(("A",), "b", "c")
READER = "encoder, CLIP, T5"


def train_stage(config: Config, device: str, steps: int = 3) -> dict[str, Any]:
    """Takes steps of a stage as ``fit`` does, all on one batch; the first one is not counted."""
    before = used(device)
    accelerator = parallel.start(config.train)
    with torch.device(device):
        model, groups = build(config)
        batch = make_batch(config, model)
    parallel.place(accelerator, config.train.parallel, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(config.train, model, groups)
    wrapped, optimizer = parallel.prepare(accelerator, config.train, model, optimizer)
    model.train()
    seconds = []
    for step in range(steps):
        if step == 1:  # the optimiser's state is there from now on, and what was built is gone
            used(device)
        begin = clock(device)
        values, _ = train_step(
            accelerator, wrapped, optimizer, [batch], trained, config.train.grad_clip
        )
        seconds.append(clock(device) - begin)
    most, loss = peak(device, before), float(values["loss"])
    del model, wrapped, optimizer, trained, batch, values
    accelerator.free_memory()
    alone = replace(config, plan=replace(config.plan, layout="ddp", devices=1))
    return {
        "batch": config.train.batch_size,
        "precision": config.train.precision,
        "step (s)": sum(seconds[1:]) / (steps - 1),
        "peak (GB)": most,
        "planned (GB)": plan_training(alone).peak / GB,
        "passed": bool(torch.isfinite(torch.tensor(loss))),
    }


def play_game(config: Config, device: str, turns: int = 2) -> dict[str, Any]:
    """Plays until the window is full and ``turns`` further, then draws as many shots.

    Neither CLIP nor T5 is there: only openings need them.
    """
    before = used(device)
    session, drawer = _load(config, device)
    base = used(device) - before  # what lies on the device between turns
    seconds, states = [], []
    for _ in range(config.play.window + turns):
        begin = clock(device)
        states.append(session.step(INSTRUCTION))
        seconds.append(clock(device) - begin)
    few = replace(config, sampling=replace(config.sampling, steps=2))
    _draw(replace(drawer, config=few), states[-1])  # kernels are chosen, caches filled
    drawn = []
    for state in states[-turns:]:
        begin = clock(device)
        _draw(drawer, state)
        drawn.append(clock(device) - begin)
    most = peak(device, before)
    mllm, decoder = sum(seconds[-turns:]) / turns, sum(drawn) / turns
    del session, drawer, states
    return {
        "MLLM (s)": mllm,
        "decoder (s)": decoder,
        "turn (s)": mllm + decoder,
        "peak (GB)": most,
        "planned (GB)": planned_peak(config),
        "between turns (GB)": base / GB if most is not None else None,
    }


def planned_peak(config: Config) -> float:
    """GB on the device in play without a reader, as ``play_plan`` has it."""
    found = [part for part in parts(config) if part.name != READER]
    return peaks(found)[config.play.device] / GB


def _draw(drawer: ShotDrawer, state: Any) -> None:
    drawer.draw([state.s_a], [state.motion_scope], [(0, 1)])


def _load(config: Config, device: str) -> tuple[GameSession, ShotDrawer]:
    """A session that only predicts, and what draws its shots, all in their configured places."""
    with torch.device(device):
        mllm = skeleton.mllm(config)
    for name, parameter in mllm.named_parameters():
        if ".lora_" not in name:  # PEFT leaves LoRA in float32
            parameter.data = parameter.data.to(precision(config, "mllm"))
    mllm = _settle(placement(config.play, "mllm"), mllm)
    with torch.device(device):
        encoder, decoder = skeleton.encoder_and_decoder(config)
        autoencoder = build_autoencoder(config)
    null = encoder.null().detach()
    del encoder
    place = placement(config.play, "decoder")
    decoder = _settle(place, decoder.to(precision(config, "decoder")))
    autoencoder = _settle(place, autoencoder.to(precision(config, "autoencoder")))
    drawer = ShotDrawer(config, decoder, autoencoder, null)
    return GameSession(config, mllm, None, _no_reader), drawer


def _settle(place: Placement, network: nn.Module) -> Any:
    """As a loaded network, which comes from host memory; what stays is there already."""
    return place.settle(network if place.kind == "stays" else network.to("cpu"))


def _no_reader() -> ShotReader:
    raise RuntimeError("no opening is read here")
