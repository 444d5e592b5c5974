"""What the processes of ``ranks.run`` do; as a script, what those of torchrun do."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from animegamer.config import Config, TrainConfig
from animegamer.training import fit


class Points:
    """Rows of a batch, their samples, and what their mean loss counts for."""

    def __init__(self, x: torch.Tensor, samples: list[int]) -> None:
        self.x, self.samples, self.weight = x, samples, float(len(x))

    def to(self, device: torch.device) -> Points:
        return Points(self.x.to(device), self.samples)


def points(first: int, size: int) -> Points:
    """Samples of one to three rows each, so that no two batches weigh the same."""
    draw, samples = torch.Generator(), list(range(first, first + size))
    rows = [torch.randn(1 + i % 3, 5, generator=draw.manual_seed(i)) for i in samples]
    return Points(torch.cat(rows), samples)


class Net(nn.Module):
    """Matrices that do not divide by the processes, vectors, what is frozen."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = nn.Linear(5, 7)
        self.decoder = nn.Sequential(Block(7), Block(7), nn.Linear(7, 5))
        self.lm_head = nn.Linear(5, 1)
        self.frozen = nn.Linear(5, 5)
        self.seen: list[int] = []  # samples, in training
        self.at: dict[int, Callable[[], None]] = {}

    def forward(self, batch: Points) -> tuple[torch.Tensor, dict[str, Any]]:
        if self.training:
            self.seen.extend(batch.samples)
            self.at.get(len(self.seen), lambda: None)()
        x = batch.x
        out = self.decoder(torch.tanh(self.encoder(x))) + self.frozen(x)
        loss = (out - x.flip(1)).square().mean() + self.lm_head(x).square().mean()
        return loss, {"error": (out - x).abs().mean()}


class Block(nn.Module):
    """A layer that is sharded by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inner(self.norm(x)))


TRAINABLE = ("encoder", "decoder", "lm_head")


def toy_config(path: Path, **settings: Any) -> Config:
    values = {
        "trainable": TRAINABLE,
        "steps": 6,
        "batch_size": 2,
        "lr": 0.02,
        "warmup_steps": 2,
        "ema_decay": 0.9,
        "save_every": 3,
        "log_every": 1,
        "validate_every": 3,
        "keep": 3,
        "threads": 1,
    }
    return Config(train=TrainConfig(run=str(path), **{**values, **settings}))


def train_toy(path: Path, settings: dict[str, Any], event: str = "") -> dict[str, Any]:
    """Trains ``Net``; says what this process saw and held of it.

    ``event`` happens to the last process when it has seen ten samples: ``nan`` breaks a weight, and
    a signal's name sends that signal.
    """
    AcceleratorState._reset_state(True)
    model = Net()
    config = toy_config(path, **settings)

    def happen() -> None:
        if event == "nan":
            with torch.no_grad():
                model.lm_head.weight.fill_(torch.nan)
        else:
            os.kill(os.getpid(), signal.Signals[event])

    if event and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        model.at[10] = happen

    def validate(step: int, directory: Path) -> dict[str, float]:
        (directory / f"sheet_{step}").write_text("")
        batch = points(1000, 4)
        alone = model.encoder(batch.x).sum()  # a part by itself
        return {"loss": float(model(batch)[0]), "alone": float(alone)}

    def export(directory: Path) -> None:
        directory.mkdir()
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        weights = {k: v.contiguous() for k, v in model.state_dict().items()}
        save_file(weights, directory / "net.safetensors")

    finished = fit(config, model, points, validate=validate, export=export)
    sharded = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    return {
        "finished": finished,
        "seen": model.seen,
        "sharded": set(sharded),
        "held": sum(p.to_local().numel() for p in sharded.values()),
        "gathered": {n: p.full_tensor().tolist() for n, p in sharded.items()},
        "parameters": {n: p.numel() for n, p in model.named_parameters()},
    }


def train_toy_with_zero(stage: int, path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """``train_toy`` under DeepSpeed, on CPUs, which Accelerate would not let it use."""
    import deepspeed.comm.torch  # noqa: F401
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def use_cpu(state: Any) -> None:
        state.device = torch.device("cpu")

    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = use_cpu
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # a compiler's work of minutes
    os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(stage)
    return train_toy(path, {"parallel": "deepspeed", "ema_decay": 0.0, **settings})


def train_stage(work: Path, stage: str, runs: list[tuple[Path, list[str]]]) -> None:
    """Trains a stage through its script, once for each directory with its overrides."""
    from tests.tiny_stages import run as run_script

    for directory, overrides in runs:
        AcceleratorState._reset_state(True)
        script, config = {
            "stage1": ("scripts.train_stage1", "stage1_joint"),
            "stage2": ("scripts.train_stage2", "stage2"),
            "stage3": ("scripts.train_stage3", "stage3"),
        }[stage]
        run_script(script, config, work, f"train.run={directory}", *overrides)


if __name__ == "__main__":  # torchrun ... rank_work.py MODE DIRECTORY TIMEOUT EVENT
    mode, directory, minutes, event = sys.argv[1:]
    settings = {"parallel": mode, "timeout_minutes": float(minutes)}
    train_toy(Path(directory), settings, event)
