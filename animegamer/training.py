"""The one training loop: explicit, over Accelerate, resumable bit for bit.

Everything random in a step follows from the seed and the step's number, so a checkpoint needs no
generator states and a killed run goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from animegamer.checkpoint import CheckpointError, RunDirectory
from animegamer.config import Config, TrainConfig

logger = logging.getLogger(__name__)

Batch = Callable[[int, int], Any]
"""(micro-batch number, process) -> that batch; there are ``accumulate`` of them a step."""


def select_trainable(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, list[str]]:
    """Freezes all but the parameters under the named modules.

    Args:
        model: the model.
        patterns: ``encoder`` trains all of that module, ``decoder.lora`` the parameters under
            ``decoder`` whose name holds ``lora_``.

    Returns:
        Parameter names by pattern; a parameter belongs to the last pattern that matches it.

    Raises:
        ValueError: if an entry matches nothing.
    """
    owner: dict[str, str] = {}
    for pattern in patterns:
        module, _, part = pattern.rpartition(".")
        found = [
            name
            for name, _ in model.named_parameters()
            if name == pattern
            or name.startswith(pattern + ".")
            or (name.startswith(module + ".") and f".{part}_" in name)
            or (name.startswith(module + ".") and f".{part}." in name)
        ]
        if not found:
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(f"train.trainable: {pattern!r} matches no parameter of {children}")
        owner.update(dict.fromkeys(found, pattern))
    groups: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in owner)
        if name in owner:
            groups[owner[name]].append(name)
    return groups


def parameter_table(model: nn.Module, groups: dict[str, list[str]]) -> str:
    """What trains, by entry, and the totals, as text."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    rows = [f"{pattern:32s} {sum(sizes[n] for n in names):>15,}" for pattern, names in groups.items()]
    trained = sum(sizes[n] for names in groups.values() for n in names)
    return "\n".join([*rows, f"{'trainable of all':32s} {trained:>15,} of {sum(sizes.values()):,}"])


def learning_rate_factor(config: TrainConfig, step: int) -> float:
    """Share of the peak rate at ``step`` (0 is the first)."""
    rise = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.schedule == "constant":
        return rise
    done = max(0, step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return rise * (config.min_lr_share + (1 - config.min_lr_share) * fall)


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


class Stop:
    """Turns SIGTERM and Ctrl-C into a clean end after the current step; a second one kills."""

    def __init__(self) -> None:
        self.requested = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *details: Any) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)


def fit(
    config: Config,
    model: nn.Module,
    batch: Batch,
    *,
    validate: Callable[[int, Path], dict[str, float]] | None = None,
    export: Callable[[Path], None] | None = None,
    parents: dict[str, str] | None = None,
) -> Path:
    """Trains ``model``: ``loss, metrics = model(batch(number, process))``.

    Args:
        config: the resolved configuration; its ``train`` section rules.
        model: module whose forward takes a batch and gives a scalar loss and metrics.
        batch: gives a micro-batch by number and process, and depends on nothing else.
        validate: called with the averaged weights in place, the step and a directory for sheets.
        export: writes the model in its public formats, averaged weights in place.
        parents: fingerprints of the checkpoints that this run starts from.

    Returns:
        The directory of the last checkpoint.

    Raises:
        CheckpointError: the run directory belongs to another configuration or parent.
        FloatingPointError: the loss is not finite; the last checkpoint is whole.
    """
    train = config.train
    if train.threads:
        torch.set_num_threads(train.threads)
    accelerator = Accelerator(mixed_precision=train.precision)
    run = RunDirectory(train.run, config)
    groups = select_trainable(model, train.trainable)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = _optimizer(train, named, groups)
    average = Average(named, train.ema_decay)
    start = _resume(run, named, optimizer, average, parents or {})
    model, optimizer = accelerator.prepare(model, optimizer)
    main = accelerator.is_main_process
    log = _Log(run.path, train, start) if main else None
    if log is not None:
        log.text(parameter_table(accelerator.unwrap_model(model), groups))

    def save(step: int) -> None:
        if main:

            def write(directory: Path) -> None:
                save_file({k: p.detach().contiguous() for k, p in named.items()},
                          directory / "trained.safetensors")
                if average.shadow:
                    save_file(average.shadow, directory / "average.safetensors")
                save_file(_optimizer_tensors(optimizer.optimizer, named),
                          directory / "optimizer.safetensors")
                if export is not None:
                    average.swap()
                    export(directory / "export")
                    average.swap()

            state = {"parents": parents or {}, "finished": step >= train.steps}
            run.save(step, state, write, train.keep)
        accelerator.wait_for_everyone()

    with Stop() as stop, ThreadPoolExecutor(1) as ahead:
        step, saved = start, start
        rank = accelerator.process_index
        parts = train.accumulate
        upcoming = ahead.submit(batch, step * parts, rank)
        while step < train.steps and not stop.requested:
            torch.manual_seed(hash((train.seed, step, rank)) % 2**63)
            factor = learning_rate_factor(train, step)
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            model.train()
            for part in range(parts):
                current = upcoming.result().to(accelerator.device)
                upcoming = ahead.submit(batch, step * parts + part + 1, rank)
                with accelerator.no_sync(model) if part + 1 < parts else nullcontext():
                    loss, metrics = model(current)
                    accelerator.backward(loss / parts)
            norm = accelerator.clip_grad_norm_(list(named.values()), train.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            average.update(step)
            if log is not None:
                log.step(step, loss, norm, train.lr * factor, metrics)
            if validate is not None and train.validate_every and (
                step % train.validate_every == 0 or step == train.steps
            ):
                _validate(accelerator, model, average, validate, step, run, log)
            if step % train.save_every == 0:
                save(step)
                saved = step
        if step != saved:
            save(step)
    if log is not None:
        log.close(step, stopped=step < train.steps)
    return run.checkpoint(step)


def _validate(
    accelerator: Accelerator,
    model: nn.Module,
    average: Average,
    validate: Callable[[int, Path], dict[str, float]],
    step: int,
    run: RunDirectory,
    log: _Log | None,
) -> None:
    if log is not None:
        average.swap()
        accelerator.unwrap_model(model).eval()
        with torch.no_grad():
            log.validation(step, validate(step, run.path))
        average.swap()
    accelerator.wait_for_everyone()


def _optimizer(
    train: TrainConfig, named: dict[str, nn.Parameter], groups: dict[str, list[str]]
) -> torch.optim.Optimizer:
    unknown = set(train.lr_groups) - set(groups)
    if unknown:
        raise ValueError(f"train.lr_groups: {sorted(unknown)[0]!r} is not in train.trainable")
    parts: list[dict[str, Any]] = []
    for pattern, names in groups.items():
        peak = train.lr_groups.get(pattern, train.lr)
        for decay in (True, False):
            chosen = [named[n] for n in names if (named[n].ndim > 1) == decay]
            if chosen:
                weight_decay = train.weight_decay if decay else 0.0
                parts.append(
                    {"params": chosen, "peak_lr": peak, "lr": peak, "weight_decay": weight_decay}
                )
    return torch.optim.AdamW(parts, betas=(0.9, 0.95), eps=1e-8, fused=True)


def _optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}:{key}"] = torch.as_tensor(value).detach().contiguous()
    return tensors


def _resume(
    run: RunDirectory,
    named: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    average: Average,
    parents: dict[str, str],
) -> int:
    latest = run.latest()
    if latest is None:
        return 0
    directory, state = latest
    if state["parents"] != parents:
        raise CheckpointError(
            f"{directory} started from {state['parents']}, now {parents}: what it builds on has "
            "changed; set train.run to a new directory"
        )
    try:
        weights = load_file(directory / "trained.safetensors")
        moments = load_file(directory / "optimizer.safetensors")
        shadow = load_file(directory / "average.safetensors") if average.shadow else {}
    except Exception as error:
        raise CheckpointError(
            f"{directory} is damaged ({error}): delete it, and the one before it is used"
        ) from error
    for name, parameter in named.items():
        if name not in weights or weights[name].shape != parameter.shape:
            raise CheckpointError(f"{directory} has no weights that fit {name}")
        parameter.data.copy_(weights[name])
        if average.shadow:
            average.shadow[name].copy_(shadow[name])
        own = {k.rpartition(":")[2]: v for k, v in moments.items() if k.rpartition(":")[0] == name}
        if own:
            optimizer.state[parameter] = own
    return int(state["step"])


class _Log:
    """metrics.jsonl, train.log, TensorBoard and a progress bar."""

    def __init__(self, path: Path, train: TrainConfig, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        self.path, self.every = path, train.log_every
        self.board = SummaryWriter(str(path / "tensorboard"), purge_step=start)
        self.bar = tqdm(
            total=train.steps, initial=start, desc=path.name, unit="step", dynamic_ncols=True,
            mininterval=1 if sys.stderr.isatty() else 60,
        )
        self.sums: dict[str, torch.Tensor] = {}
        self.count, self.since = 0, time.perf_counter()

    def text(self, message: str) -> None:
        """A note for train.log."""
        with (self.path / "train.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def record(self, step: int, values: dict[str, float]) -> None:
        """A line of metrics.jsonl, and its TensorBoard scalars."""
        line = {"step": step, "time": round(time.time(), 1), **values}
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def step(
        self, step: int, loss: torch.Tensor, norm: Any, lr: float, metrics: dict[str, Any]
    ) -> None:
        """One optimiser step."""
        self.bar.update()
        values = {"loss": loss.detach(), "grad_norm": torch.as_tensor(norm), **metrics}
        for name, value in values.items():
            value = torch.as_tensor(value).detach().float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.count += 1
        if step % self.every:
            return
        means = {name: float(total) / self.count for name, total in self.sums.items()}
        if not math.isfinite(means["loss"]):
            raise FloatingPointError(
                f"loss is {means['loss']} before step {step}: lower train.lr, or use "
                "train.precision=no; the last checkpoint is whole"
            )
        seconds = (time.perf_counter() - self.since) / self.count
        self.record(step, {**means, "lr": lr, "seconds_per_step": seconds})
        self.bar.set_postfix(loss=f"{means['loss']:.4f}")
        self.sums, self.count, self.since = {}, 0, time.perf_counter()

    def validation(self, step: int, values: dict[str, float]) -> None:
        """Results of a validation."""
        self.record(step, {f"validation/{k}": float(v) for k, v in values.items()})
        self.text(f"step {step}: " + ", ".join(f"{k} {v:.4f}" for k, v in values.items()))
        self.since = time.perf_counter()

    def close(self, step: int, stopped: bool) -> None:
        """The end of the run, or of this part of it."""
        self.text(f"stopped at step {step}" if stopped else f"finished at step {step}")
        self.bar.close()
        self.board.close()
