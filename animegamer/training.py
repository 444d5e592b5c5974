"""The one training loop: explicit, over Accelerate, resumable bit for bit.

Everything random in a step follows from the seed and the step's number, so a checkpoint needs no
generator states and a killed run goes on as if nothing had happened.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from animegamer.checkpoint import CheckpointError, RunDirectory
from animegamer.config import Config, TrainConfig
from animegamer.optimizer import build_optimizer
from animegamer.training_log import Log

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
        ValueError: if an entry matches nothing, or there is none.
    """
    if not patterns:
        raise ValueError("train.trainable is empty: name what trains, such as [encoder, decoder]")
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
    counts = {pattern: sum(sizes[n] for n in names) for pattern, names in groups.items()}
    rows = [f"{pattern:32s} {count:>15,}" for pattern, count in counts.items()]
    total = f"{sum(counts.values()):>15,} of {sum(sizes.values()):,}"
    return "\n".join([*rows, f"{'trainable of all':32s} {total}"])


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
) -> bool:
    """Trains ``model``: ``loss, metrics = model(batch(number, process))``.

    Args:
        config: the resolved configuration; its ``train`` section rules.
        model: module whose forward takes a batch and gives a scalar loss and metrics.
        batch: gives a micro-batch by number and process, and depends on nothing else.
        validate: called with the averaged weights in place, the step and a directory for sheets.
        export: writes the model in its public formats, averaged weights in place.
        parents: fingerprints of the checkpoints that this run starts from.

    Returns:
        Whether all steps are done; False after SIGTERM or Ctrl-C, when the same command goes on.

    Raises:
        CheckpointError: the run directory belongs to another configuration or parent.
        FloatingPointError: the loss or a weight is not finite; the last checkpoint is whole.
    """
    train = config.train
    if train.threads:
        torch.set_num_threads(train.threads)
    accelerator = Accelerator(mixed_precision=train.precision)
    run = RunDirectory(train.run, config)
    groups = select_trainable(model, train.trainable)
    model.to(accelerator.device)  # before the averages are copied from it
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(train, model, groups)
    average = Average(named, train.ema_decay)
    state = _resume(run, named, optimizer, average, parents or {})
    start = int(state.get("step", 0))
    model, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.scaler is not None and "scaler" in state:
        accelerator.scaler.load_state_dict(state["scaler"])
    main = accelerator.is_main_process
    log = Log(run.path, train, start, state.get("log", {})) if main else None
    if log is not None:
        log.text(parameter_table(accelerator.unwrap_model(model), groups))

    def save(step: int) -> None:
        if log is not None:
            _check_finite(named, step)

            state: dict[str, Any] = {"parents": parents or {}, "finished": step >= train.steps}
            state["log"] = log.pending()
            if accelerator.scaler is not None:
                state["scaler"] = accelerator.scaler.state_dict()
            write = partial(_write, named, average, optimizer.optimizer, export)
            run.save(step, state, write, train.keep)
        accelerator.wait_for_everyone()

    with Stop() as stop, ThreadPoolExecutor(1) as ahead:
        step, saved = start, start
        rank = accelerator.process_index
        parts = train.accumulate
        upcoming = ahead.submit(batch, step * parts, rank)
        while step < train.steps and not _stopping(accelerator, stop):
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
            if (
                validate is not None
                and train.validate_every
                and (step % train.validate_every == 0 or step == train.steps)
            ):
                _validate(accelerator, model, average, validate, step, run, log)
            if step % train.save_every == 0:
                save(step)
                saved = step
        if step != saved:
            save(step)
    if log is not None:
        log.close(step, stopped=step < train.steps)
    return step >= train.steps


def _validate(
    accelerator: Accelerator,
    model: nn.Module,
    average: Average,
    validate: Callable[[int, Path], dict[str, float]],
    step: int,
    run: RunDirectory,
    log: Log | None,
) -> None:
    if log is not None:
        average.swap()
        accelerator.unwrap_model(model).eval()
        with torch.no_grad():
            log.validation(step, validate(step, run.path))
        average.swap()
    accelerator.wait_for_everyone()


def _write(
    named: dict[str, nn.Parameter],
    average: Average,
    optimizer: torch.optim.Optimizer,
    export: Callable[[Path], None] | None,
    directory: Path,
) -> None:
    """What a checkpoint holds beside its ``state.json``."""
    weights = {k: p.detach().contiguous() for k, p in named.items()}
    save_file(weights, directory / "trained.safetensors")
    if average.shadow:
        save_file(average.shadow, directory / "average.safetensors")
    save_file(_optimizer_tensors(optimizer, named), directory / "optimizer.safetensors")
    if export is not None:
        average.swap()
        export(directory / "export")
        average.swap()


def _optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}:{key}"] = torch.as_tensor(value).detach().contiguous()
    return tensors


def _stopping(accelerator: Accelerator, stop: Stop) -> bool:
    """Whether any process was asked to stop: all end after the same step, or none could save."""
    if accelerator.num_processes == 1:
        return stop.requested
    flag = torch.tensor(float(stop.requested), device=accelerator.device)
    return accelerator.reduce(flag, "sum").item() > 0


def _check_finite(named: dict[str, nn.Parameter], step: int) -> None:
    for name, parameter in named.items():
        if not parameter.isfinite().all():
            raise FloatingPointError(
                f"{name} is not finite after step {step}, nothing is saved: lower train.lr, or use "
                "train.precision=no; the last checkpoint is whole"
            )


def _resume(
    run: RunDirectory,
    named: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    average: Average,
    parents: dict[str, str],
) -> dict[str, Any]:
    """Loads the newest checkpoint and returns its ``state.json``, or {} at the start of a run."""
    latest = run.latest()
    if latest is None:
        return {}
    directory, state = latest
    changed = [k for k, old in state["parents"].items() if parents.get(k) != old]
    if changed:
        raise CheckpointError(
            f"{directory} builds on other files than there are now ({', '.join(changed)} changed): "
            "put them back, or set train.run to a new directory"
        )
    try:
        weights = load_file(directory / "trained.safetensors")
        moments = load_file(directory / "optimizer.safetensors")
        shadow = load_file(directory / "average.safetensors") if average.shadow else {}
    except Exception as error:
        raise CheckpointError(
            f"{directory} is damaged ({error}): delete it, and the one before it is used"
        ) from error
    for kept in (weights, *([shadow] if average.shadow else [])):
        for name in sorted(named.keys() ^ kept.keys()):
            raise CheckpointError(
                f"{directory} is of another model: {name} is "
                + ("missing" if name in named else "unexpected")
            )
    for name, parameter in named.items():
        if weights[name].shape != parameter.shape:
            raise CheckpointError(
                f"{directory} is of another model: {name} is {tuple(weights[name].shape)}, "
                f"expected {tuple(parameter.shape)}"
            )
        parameter.data.copy_(weights[name])
        if average.shadow:
            average.shadow[name].copy_(shadow[name])
        own = {k.rpartition(":")[2]: v for k, v in moments.items() if k.rpartition(":")[0] == name}
        if own:
            optimizer.state[parameter] = own
    return state
