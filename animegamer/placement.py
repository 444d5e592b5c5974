"""Where the networks of play lie: on their device, taking turns on it, or passing through it.

Weights never change in play, so a network that leaves its device needs no copying back: what lies
in host memory is still there. ``play.memory`` in the configuration says who does what.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from animegamer.config import ConfigError, PlayConfig

Kind = Literal["stays", "turns", "layers"]


@dataclass(frozen=True)
class Placement:
    """Where one part of the system works, and where it waits.

    Attributes:
        device: torch device that it works on.
        kind: ``stays`` there; ``turns`` waits in host memory while others work; ``layers`` lies in
            host memory, from where each layer comes when it is needed.
    """

    device: str
    kind: Kind

    def settle(self, part: Any) -> Any:
        """Puts a loaded part in its place, networks in evaluation mode."""
        if isinstance(part, torch.Tensor):
            return part.to(self.device)
        part = part.eval()
        if self.kind == "layers" and hasattr(part, "through_layers"):
            part.through_layers(self.device)
            return part
        return part.to(self.device) if self.kind == "stays" else part

    @contextmanager
    def working(self, *networks: Any) -> Iterator[None]:
        """While networks work: those that take turns are on the device, and leave it afterwards."""
        waiting = [network for network in networks if self._waits(network)]
        kept = [(t, t.data) for n in waiting for t in (*n.parameters(), *n.buffers())]
        try:
            for tensor, _ in kept:
                tensor.data = tensor.data.to(self.device)
            yield
        finally:
            for tensor, data in kept:
                tensor.data = data
            if kept and torch.device(self.device).type == "cuda":
                # The next network asks for blocks of other sizes than this one leaves behind.
                torch.cuda.empty_cache()

    def _waits(self, network: Any) -> bool:
        if self.kind == "layers":  # what cannot pass by layers takes turns
            return isinstance(network, nn.Module) and not hasattr(network, "through_layers")
        return self.kind == "turns" and isinstance(network, nn.Module)


def placement(play: PlayConfig, part: Literal["mllm", "decoder", "reader"]) -> Placement:
    """The configured place of a part.

    Raises:
        ConfigError: if its device is not there.
    """
    memory = play.memory
    key = f"play.memory.{part}_device"
    device = getattr(memory, f"{part}_device")
    if device is None:
        key, device = "play.device", play.device
    _check_device(key, device)
    return Placement(device, getattr(memory, part))


def _check_device(key: str, name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{key} is {name!r}, expected a torch device such as cpu or cuda:0"
        ) from (error)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"{key} is {name}, but torch sees {count} GPUs: choose another device, such as "
                f"{key}=cpu, or install torch for this machine's GPU"
            )
