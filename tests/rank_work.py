"""What the processes of ``ranks.run`` do, and everything that they import."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers  # noqa: F401
import peft  # noqa: F401
import torch
import transformers  # noqa: F401
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from animegamer.config import Config, TrainConfig
from animegamer.training import fit
from tests.tiny_stages import run as run_script


class Points:
    """Rows of a batch, and what their mean loss counts for."""

    def __init__(self, x: torch.Tensor, weight: float) -> None:
        self.x, self.weight = x, weight

    def to(self, device: torch.device) -> Points:
        return Points(self.x.to(device), self.weight)


def points(first: int, size: int) -> Points:
    """Samples of one to three rows each, so that no two batches weigh the same."""
    draw = torch.Generator()
    rows = [
        torch.randn(1 + i % 3, 5, generator=draw.manual_seed(i)) for i in range(first, first + size)
    ]
    x = torch.cat(rows)
    return Points(x, float(len(x)))


class Net(nn.Module):
    """Every kind of parameter: matrices that do not divide by the processes, vectors, frozen ones."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = nn.Linear(5, 7)
        self.decoder = nn.Sequential(Block(7), Block(7), nn.Linear(7, 5))
        self.lm_head = nn.Linear(5, 1)
        self.frozen = nn.Linear(5, 5)
        self.held: list[float] = []

    def forward(self, batch: Points) -> tuple[torch.Tensor, dict[str, Any]]:
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


def train_toy(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains ``Net``; says what this process held of it."""
    AcceleratorState._reset_state(True)
    model = Net()
    config = toy_config(path, **settings)

    def validate(step: int, directory: Path) -> dict[str, float]:
        (directory / f"sheet_{step}").write_text("")
        batch = points(1000, 4)
        alone = model.encoder(batch.x).sum()  # a part by itself
        return {"loss": float(model(batch)[0]), "alone": float(alone)}

    def export(directory: Path) -> None:
        directory.mkdir()
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        save_file(
            {k: v.contiguous() for k, v in model.state_dict().items()},
            directory / "net.safetensors",
        )

    finished = fit(config, model, points, validate=validate, export=export)
    sharded = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    held = sum(p.to_local().numel() for p in sharded.values())
    return {
        "finished": finished,
        "sharded": sorted(sharded),
        "held": held,
        "all": sum(p.numel() for p in model.parameters()),
    }
