"""What a checkpoint of a training run holds beside its ``state.json``, and how it is read back.

``trained``, ``average`` and ``optimizer`` are safetensors: one file each, or, written by shards,
``trained-00001-of-00002.safetensors`` with the rows that each process held. Either is read by any
number of processes, in any mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from animegamer import parallel
from animegamer.checkpoint import CheckpointError


class Average:
    """Exponential moving average of the trained parameters (rises to ``decay`` at the start)."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.parameters = parameters
        self.shadow = {k: p.detach().clone() for k, p in parameters.items()} if decay else {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes the parameters after ``step`` steps in."""
        if self.shadow:
            decay = min(self.decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(
                list(self.shadow.values()), [p.data for p in self.parameters.values()], 1 - decay
            )

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges parameters and averages; a second call undoes it."""
        for name, shadow in self.shadow.items():
            parameter = self.parameters[name]
            kept = parameter.detach().clone()
            parameter.copy_(shadow)
            shadow.copy_(kept)


@dataclass
class TrainState:
    """Trained weights, averages and the optimiser's moments, whole or sharded.

    Attributes:
        model: all of it.
        named: the parameters that train, by name.
        optimizer: torch's, or DeepSpeed's around it; not Accelerate's.
        average: of the parameters that train.
    """

    model: nn.Module
    named: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    average: Average

    def write(
        self, directory: Path | None, export: Callable[[Path], None] | None, sharded: bool
    ) -> None:
        """Writes everything; all processes have to call it.

        Args:
            directory: where to; None in all processes but the main one.
            export: writes the model in its public formats, averaged weights in place; called in
                the main process alone, where all parameters are whole for it.
            sharded: every process writes what it holds.
        """
        place = parallel.agree_on(directory) if sharded else directory
        for part, tensors in self._parts():
            held, name = {}, f"{part}.safetensors"
            if sharded:
                number, count = _share(next(iter(self.named.values())))
                name = f"{part}-{number + 1:05d}-of-{count:05d}.safetensors"
            for key, tensor in tensors:
                # One after the other: a process that shards may have no room for all of them whole.
                own = parallel.local(tensor) if sharded else parallel.whole(tensor)
                repeated = sharded and number > 0 and not isinstance(tensor, DTensor)
                if place is not None and not repeated:
                    held[key] = own.detach().cpu().contiguous()
            if place is not None:
                save_file(held, place / name)
        if sharded:
            torch.distributed.barrier()  # before the main process puts the directory in its place
        if export is not None:
            self.average.swap()
            with parallel.whole_parameters(self.model):
                if directory is not None:
                    export(directory / "export")
            self.average.swap()

    def _parts(self) -> Iterator[tuple[str, Iterable[tuple[str, torch.Tensor]]]]:
        yield "trained", self.named.items()
        if self.average.shadow:
            yield "average", self.average.shadow.items()
        yield "optimizer", self._moments()

    def _moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.named.items():
            for key, value in parallel.moments(self.optimizer, parameter).items():
                yield f"{name}:{key}", value

    @torch.no_grad()
    def read(self, directory: Path) -> None:
        """Reads what ``write`` wrote, each process what it holds.

        Raises:
            CheckpointError: a file is missing, damaged or of another model.
        """
        parts = [("trained", self.named)]
        if self.average.shadow:
            parts.append(("average", self.average.shadow))
        stored = {part: Stored(directory, part) for part, _ in parts}
        for part, tensors in parts:
            found = stored[part]
            for name in sorted(tensors.keys() ^ found.keys()):
                raise CheckpointError(
                    f"{directory} is of another model: {name} is "
                    + ("missing" if name in tensors else "unexpected")
                )
            for name, tensor in tensors.items():
                if found.shape(name) != tuple(tensor.shape):
                    raise CheckpointError(
                        f"{directory} is of another model: {name} is {found.shape(name)}, "
                        f"expected {tuple(tensor.shape)}"
                    )
        moments = Stored(directory, "optimizer")
        for part, tensors in parts:
            for name, tensor in tensors.items():
                stored[part].copy_to(name, tensor.data)
        for entry in moments.keys():
            name, _, key = entry.rpartition(":")
            if name in self.named:
                state = self.optimizer.state[self.named[name]]
                state[key] = moments.like(entry, self.named[name])


def _share(tensor: torch.Tensor) -> tuple[int, int]:
    assert isinstance(tensor, DTensor)
    return tensor.device_mesh.get_local_rank(), tensor.device_mesh.size()


class Stored:
    """One part of a checkpoint on disk, in one file or in shards by rows.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """

    def __init__(self, directory: Path, part: str) -> None:
        files = [directory / f"{part}.safetensors"]
        if not files[0].is_file():
            found = sorted(directory.glob(f"{part}-*-of-*.safetensors"))
            count = int(found[0].stem.rpartition("-")[2]) if found else 0
            files = [
                directory / f"{part}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
            ] or files
        try:
            self._files: list[Any] = [safe_open(file, framework="pt") for file in files]
        except Exception as error:
            raise CheckpointError(
                f"{directory} is damaged ({error}): delete it, and the one before it is used"
            ) from error
        self._names = [set(file.keys()) for file in self._files]

    def keys(self) -> set[str]:
        """Names of the tensors."""
        return set().union(*self._names)

    def _holders(self, name: str) -> list[Any]:
        pairs = zip(self._files, self._names, strict=True)
        return [file for file, names in pairs if name in names]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        shapes = [tuple(f.get_slice(name).get_shape()) for f in self._holders(name)]
        return shapes[0] and (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def rows(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor, or some of its rows; nothing else is read."""
        holders = self._holders(name)
        if rows is None and len(holders) == 1:
            return holders[0].get_tensor(name)
        rows = rows or slice(0, self.shape(name)[0])
        taken, place = [], 0
        for part in (file.get_slice(name) for file in holders):
            size = part.get_shape()[0]
            first, last = max(rows.start - place, 0), min(rows.stop - place, size)
            if first < last:
                taken.append(part[first:last])
            place += size
        return torch.cat(taken) if taken else torch.empty(0, *self.shape(name)[1:])

    def copy_to(self, name: str, tensor: torch.Tensor) -> None:
        """Fills ``tensor``, or the rows of it that this process holds."""
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(self.rows(name, parallel.held_rows(tensor)))
        else:
            tensor.copy_(self.rows(name))

    def like(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor of the optimiser, laid out as its parameter where it has its shape."""
        if not isinstance(parameter, DTensor) or self.shape(name) != tuple(parameter.shape):
            return self.rows(name)
        tensor = torch.zeros_like(parameter)
        self.copy_to(name, tensor)
        return tensor
