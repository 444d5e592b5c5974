"""Several processes on one run: how they were started, what they share, tensors from shards.

``ddp`` gives every process the whole model. ``fsdp`` gives each a share of every parameter (rows,
by torch's ``fully_shard``) and so of gradients and moments. ``deepspeed`` is ZeRO by Accelerate.
Accelerate's own FSDP is not used: on a CPU it becomes DDP without a word, and one path that the
tests run on CPUs is better than two.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, broadcast_object_list
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from animegamer import zero
from animegamer.config import TrainConfig

HOW = (
    "start it with accelerate launch --config_file configs/accelerate/{}.yaml, on CPUs with "
    "ACCELERATE_USE_CPU=true torchrun --nproc_per_node N (accelerate launch starts one process)"
)


class LaunchError(RuntimeError):
    """Processes that were started in another way than the configuration asks for."""


class PeerError(RuntimeError):
    """Another process of the run died, or does not answer."""


def process_count() -> int:
    """How many processes were started for this run; torchrun and Accelerate set it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is the process that writes."""
    return os.environ.get("RANK", "0") == "0"


def start(train: TrainConfig) -> Accelerator:
    """Joins the run's processes.

    Raises:
        LaunchError: if their number or mode is not the one asked for.
    """
    mode, count = train.parallel, process_count()
    how = HOW.format("deepspeed_zero2" if mode == "deepspeed" else mode)
    if train.processes and train.processes != count:
        raise LaunchError(f"train.processes is {train.processes}, but {count} started: {how}")
    if _asked("ACCELERATE_USE_FSDP"):
        raise LaunchError(
            "the launcher asks for Accelerate's FSDP, which is not used here: set "
            f"train.parallel=fsdp and {HOW.format('fsdp')}"
        )
    if mode == "fsdp" and count == 1:
        raise LaunchError(f"train.parallel is fsdp, but one process cannot shard: {how}")
    if mode == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise LaunchError(
            "train.parallel is deepspeed, but the package is not installed: "
            "pip install -e '.[deepspeed]', or set train.parallel=fsdp"
        )
    if _asked("ACCELERATE_USE_DEEPSPEED") != (mode == "deepspeed"):
        raise LaunchError(
            f"train.parallel is {mode}, but the launcher "
            f"{'does not ask' if mode == 'deepspeed' else 'asks'} for DeepSpeed: {how}"
        )
    patience = InitProcessGroupKwargs(timeout=timedelta(minutes=train.timeout_minutes))
    precision = "no" if mode == "deepspeed" else train.precision  # see ``prepare``
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[patience])
    got = accelerator.distributed_type
    if accelerator.num_processes != count or not _fits(mode, got):
        raise LaunchError(
            f"asked for {mode} with {count} processes, got {got.value} with "
            f"{accelerator.num_processes}: {how}"
        )
    return accelerator


def _asked(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1")


def _fits(mode: str, got: DistributedType) -> bool:
    if mode == "deepspeed":
        return got == DistributedType.DEEPSPEED
    return got == DistributedType.NO or got.value.startswith("MULTI_")


def place(accelerator: Accelerator, mode: str, model: nn.Module) -> None:
    """Moves the model to the device, and shards it in place for ``fsdp``.

    Shards are of the blocks that diffusers and transformers call whole (``_no_split_modules``), and
    of the rest. Parameters stay float32, also as they travel: autocast does what it does in one
    process.
    """
    if mode != "fsdp":
        model.to(accelerator.device)
        return
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    blocks = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    whole = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    if whole:
        raise LaunchError(f"asked for fsdp, but {whole[0]} is not sharded")


def prepare(
    accelerator: Accelerator, train: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """The model as the loop calls it, and the optimiser, wrapped by Accelerate."""
    if train.parallel == "fsdp":
        return model, accelerator.prepare(optimizer)
    if train.parallel == "deepspeed":
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings["train_micro_batch_size_per_gpu"] = train.batch_size
        settings["gradient_accumulation_steps"] = 1  # the loop says when a step is whole
        settings["gradient_clipping"] = train.grad_clip
        if train.precision == "bf16":
            settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        kept = dict(optimizer.state)
        optimizer.state.clear()
        engine, wrapped = accelerator.prepare(model, optimizer)
        zero.set_moments(wrapped.optimizer, kept)
        return engine, wrapped
    return accelerator.prepare(model, optimizer)


def moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """What the optimiser keeps of a parameter; with shards, every process has to ask."""
    if zero.is_zero(optimizer):
        return zero.moments(optimizer, parameter)
    return {k: torch.as_tensor(v) for k, v in optimizer.state.get(parameter, {}).items()}


def backward(accelerator: Accelerator, loss: torch.Tensor, last: bool) -> None:
    """Adds a micro-batch's gradient. DeepSpeed takes the whole step with the last one."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.deepspeed_engine_wrapped.backward(loss, sync_gradients=last)
    else:
        accelerator.backward(loss)


def is_sharded(model: nn.Module) -> bool:
    """Whether every forward pass needs all processes."""
    return isinstance(model, FSDPModule) or any(map(_is_partitioned, model.parameters()))


def _is_partitioned(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "ds_tensor")  # a parameter under ZeRO-3


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that all processes' shards make; every process has to call it."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if _is_partitioned(tensor):
        with zero.gathered(tensor):
            return tensor.detach().clone()
    return tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this process holds."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return zero.local(tensor) if _is_partitioned(tensor) else tensor


def sharded_like(tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """A whole tensor, known to every process, laid out as ``example`` is."""
    if not isinstance(example, DTensor):
        return tensor
    return distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)


def held_rows(tensor: torch.Tensor) -> slice:
    """The rows of a sharded tensor that this process holds."""
    assert isinstance(tensor, DTensor)
    shares = tensor.device_mesh.size()
    each = -(-tensor.shape[0] // shares)
    first = min(each * tensor.device_mesh.get_local_rank(), tensor.shape[0])
    return slice(first, min(first + each, tensor.shape[0]))


@contextmanager
def callable_in_parts(model: nn.Module) -> Iterator[None]:
    """For a while, parts of a sharded model may be called by themselves, as validation does."""
    if not isinstance(model, FSDPModule):
        yield  # under ZeRO-3 every module gathers its own
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """For a while, the main process's model has whole parameters, in host memory, to be saved."""
    sharded = {
        n: p for n, p in model.named_parameters() if isinstance(p, DTensor) or _is_partitioned(p)
    }
    for name, parameter in sharded.items():
        gathered = whole(parameter).detach()
        if is_main():
            _replace(model, name, nn.Parameter(gathered.cpu(), parameter.requires_grad))
    try:
        yield
    finally:
        if is_main():
            for name, parameter in sharded.items():
                _replace(model, name, parameter)


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, parameter)


def mean(accelerator: Accelerator, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Means of scalars over all processes."""
    if accelerator.num_processes == 1 or not values:
        return values
    stacked = torch.stack([value.detach().float() for value in values.values()])
    return dict(zip(values, accelerator.reduce(stacked, "mean"), strict=True))


def any_of(accelerator: Accelerator, flag: bool) -> bool:
    """Whether the flag is set in any process; every process has to ask."""
    if accelerator.num_processes == 1:
        return flag
    return (
        accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum").item() > 0
    )


def agree_on(path: Path | None) -> Path:
    """The main process's path, in all of them."""
    paths = [path]
    broadcast_object_list(paths)
    assert paths[0] is not None
    return paths[0]


@contextmanager
def peers() -> Iterator[None]:
    """Says what an error in talking to other processes means.

    Raises:
        PeerError: in place of what gloo or NCCL say when a process has died or hangs.
    """
    try:
        yield
    except RuntimeError as error:
        if not _from_peer(error):
            raise
        raise PeerError(
            "another process of this run died, or did not answer within train.timeout_minutes: see "
            "its own output. The last checkpoint is whole, and the same command goes on from there "
            f"({' '.join(str(error).split())[:200]})"
        ) from error


def _from_peer(error: RuntimeError) -> bool:
    kinds = (torch.distributed.DistBackendError, torch.distributed.DistNetworkError)
    words = ("gloo", "nccl", "Connection closed by peer", "Timed out waiting", "ProcessGroup")
    return isinstance(error, kinds) or any(word in str(error) for word in words)
