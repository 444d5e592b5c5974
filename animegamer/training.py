"""The one training loop: explicit, over Accelerate, resumable bit for bit.

Everything random in a step follows from the seed, the step's number and the samples' numbers, so a
checkpoint needs no generator states and a killed run goes on as if nothing had happened. With other
processes than before it goes on, too, with the sample that is next.
"""

from __future__ import annotations

import math
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from animegamer import parallel
from animegamer.checkpoint import CheckpointError, RunDirectory
from animegamer.config import Config
from animegamer.optimizer import build_optimizer
from animegamer.schedule import SampleSchedule, learning_rate_factor
from animegamer.train_state import Average, TrainState
from animegamer.training_log import Log

Batch = Callable[..., Any]
"""(first sample, size) -> a batch; with ``frames=1`` too in steps on first frames. A batch has
``to(device)``, and a ``weight`` if its mean loss is over more or less than others' are."""


def select_trainable(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, list[str]]:
    """Freezes all but the parameters under the named modules.

    Args:
        model: the model.
        patterns: ``encoder`` trains all of that module, ``decoder.lora`` the parameters under
            ``decoder`` whose name holds ``lora_``, ``decoder.norm1.linear`` those of every
            ``norm1.linear`` under it.

    Returns:
        Parameter names by pattern; a parameter belongs to the last pattern that matches it.

    Raises:
        ValueError: if an entry matches nothing, there is none, or what LoRA lies on would train.
    """
    if not patterns:
        raise ValueError("train.trainable is empty: name what trains, such as [encoder, decoder]")
    owner: dict[str, str] = {}
    for pattern in patterns:
        found = [name for name, _ in model.named_parameters() if _matches(pattern, name)]
        if not found:
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(f"train.trainable: {pattern!r} matches no parameter of {children}")
        frozen = [name for name in found if ".base_layer." in name]
        if frozen:
            raise ValueError(
                f"train.trainable: {pattern!r} takes {len(frozen)} weights of the base that LoRA "
                f"lies on, the first {frozen[0]}: name {pattern}.lora and what else trains, or set "
                "the LoRA rank to 0 to train the base"
            )
        owner.update(dict.fromkeys(found, pattern))
    groups: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in owner)
        if name in owner:
            groups[owner[name]].append(name)
    return groups


def _matches(pattern: str, name: str) -> bool:
    """Whether an entry of ``train.trainable`` names a parameter."""
    if name == pattern or name.startswith(pattern + "."):
        return True
    words = pattern.split(".")
    for i in range(1, len(words)):
        module, part = ".".join(words[:i]), ".".join(words[i:])
        if name.startswith(module + ".") and (f".{part}_" in name or f".{part}." in name):
            return True
    return False


def parameter_table(model: nn.Module, groups: dict[str, list[str]]) -> str:
    """What trains, by entry, and the totals, as text."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    counts = {pattern: sum(sizes[n] for n in names) for pattern, names in groups.items()}
    rows = [f"{pattern:32s} {count:>15,}" for pattern, count in counts.items()]
    total = f"{sum(counts.values()):>15,} of {sum(sizes.values()):,}"
    return "\n".join([*rows, f"{'trainable of all':32s} {total}"])


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
    """Trains ``model``: ``loss, metrics = model(batch(first, size))``.

    Args:
        config: the resolved configuration; its ``train`` section rules.
        model: module whose forward takes a batch and gives a scalar loss and metrics.
        batch: gives the samples from a number on, and depends on nothing else.
        validate: called with the averaged weights in place, the step and a directory for sheets.
        export: writes the model in its public formats, averaged weights in place.
        parents: fingerprints of the checkpoints that this run starts from.

    Returns:
        Whether all steps are done; False after SIGTERM or Ctrl-C, when the same command goes on.

    Raises:
        CheckpointError: the run directory belongs to another configuration or parent.
        FloatingPointError: the loss or a weight is not finite; the last checkpoint is whole.
        LaunchError: the processes are not those, or not in the mode, that is configured.
        PeerError: another process died or hangs.
    """
    train = config.train
    if train.threads:
        torch.set_num_threads(train.threads)
    accelerator = parallel.start(train)
    rank, main = accelerator.process_index, accelerator.is_main_process
    run = RunDirectory(train.run, config)
    groups = select_trainable(model, train.trainable)
    table = parameter_table(model, groups)
    parallel.place(accelerator, train.parallel, model)  # before averages and moments are made of it
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    average = Average(named, train.ema_decay)
    optimizer = build_optimizer(train, model, groups)
    state = TrainState(model, named, optimizer, average)
    schedule = SampleSchedule(train, accelerator.num_processes)
    past = _resume(run, state, schedule, parents or {})
    start = int(past.get("step", 0))
    cursor = int(past.get("samples", schedule.before(start)))
    wrapped, optimizer = parallel.prepare(accelerator, train, model, optimizer)
    state.optimizer = optimizer.optimizer
    if accelerator.scaler is not None and "scaler" in past:
        accelerator.scaler.load_state_dict(past["scaler"])
    log = Log(run.path, train, start, past.get("log", {})) if main else None
    if log is not None:
        split = ", ".join(f"{k} {v}" for k, v in schedule.split().items())
        log.text(f"{train.parallel}: {split}; from sample {cursor} on\n{table}")

    def load(step: int, cursor: int) -> list[Any]:
        size, frames = schedule.micro_batch(step)
        options = {} if frames is None else {"frames": frames}
        return [batch(first, size, **options) for first in schedule.firsts(step, cursor, rank)]

    def save(step: int, cursor: int) -> None:
        _check_finite(accelerator, named, step)
        write = partial(state.write, export=export, sharded=train.checkpoint == "sharded")
        if log is not None:
            record = {"parents": parents or {}, "finished": step >= train.steps, "samples": cursor}
            record |= {"split": schedule.split(), "log": log.pending()}
            if accelerator.scaler is not None:
                record["scaler"] = accelerator.scaler.state_dict()
            run.save(step, record, write, train.keep)
        else:
            write(None)
        accelerator.wait_for_everyone()

    with parallel.peers(), Stop() as stop, ThreadPoolExecutor(1) as ahead:
        step, saved = start, start
        upcoming = ahead.submit(load, step, cursor)
        while step < train.steps and not parallel.any_of(accelerator, stop.requested):
            torch.manual_seed(hash((train.seed, step, rank)) % 2**63)
            factor = learning_rate_factor(train, step)
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            model.train()
            parts = upcoming.result()
            cursor += schedule.samples(step)
            upcoming = ahead.submit(load, step + 1, cursor)
            values, norm = train_step(
                accelerator, wrapped, optimizer, parts, list(named.values()), train.grad_clip
            )
            step += 1
            average.update(step)
            values = parallel.mean(accelerator, values)
            norm = parallel.whole(torch.as_tensor(norm))
            if log is not None:
                log.step(step, values.pop("loss"), norm, train.lr * factor, values)
            due = train.validate_every and step % train.validate_every == 0
            if validate is not None and train.validate_every and (due or step == train.steps):
                _validate(accelerator, model, average, validate, step, run, log)
            if step % train.save_every == 0:
                save(step, cursor)
                saved = step
        if step != saved:
            save(step, cursor)
    if log is not None:
        log.close(step, stopped=step < train.steps)
    return step >= train.steps


def train_step(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    parts: list[Any],
    trained: list[nn.Parameter],
    grad_clip: float,
) -> tuple[dict[str, torch.Tensor], Any]:
    """One step of the optimiser: forward and backward of its micro-batches, clipping, update.

    Args:
        accelerator: the run's.
        model: as ``parallel.prepare`` gives it.
        optimizer: likewise.
        parts: the micro-batches.
        trained: the parameters that train.
        grad_clip: largest norm of their gradients.

    Returns:
        The loss and the metrics, means over the micro-batches, and the norm before clipping.
    """
    values: dict[str, torch.Tensor] = {}
    for number, share in enumerate(_shares(accelerator, parts)):
        last = number + 1 == len(parts)
        with nullcontext() if last else accelerator.no_sync(model):
            with accelerator.autocast():
                loss, metrics = model(parts[number].to(accelerator.device))
            parallel.backward(accelerator, loss.float() * share, last)
        _add(values, share, {"loss": loss, **metrics})
    norm = accelerator.clip_grad_norm_(trained, grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return values, norm


def _shares(accelerator: Accelerator, parts: list[Any]) -> list[float]:
    """What each micro-batch's loss counts for, so that the gradient is that of one large batch."""
    weights = [getattr(part, "weight", 1.0) for part in parts]
    total = torch.tensor(sum(weights), dtype=torch.float64, device=accelerator.device)
    if accelerator.num_processes > 1 and hasattr(parts[0], "weight"):
        total = accelerator.reduce(total, "mean")
    return [weight / total.item() for weight in weights]


def _add(values: dict[str, torch.Tensor], share: float, more: dict[str, Any]) -> None:
    for name, value in more.items():
        value = torch.as_tensor(value).detach().float() * share
        values[name] = values[name] + value if name in values else value


def _validate(
    accelerator: Accelerator,
    model: nn.Module,
    average: Average,
    validate: Callable[[int, Path], dict[str, float]],
    step: int,
    run: RunDirectory,
    log: Log | None,
) -> None:
    """In the main process; with shards in all of them, as every forward pass needs them all."""
    if log is not None or parallel.is_sharded(model):
        average.swap()
        model.eval()
        with (
            tempfile.TemporaryDirectory() as scrap,
            parallel.callable_in_parts(model),
            torch.no_grad(),
        ):
            values = validate(step, run.path if log is not None else Path(scrap))
        average.swap()
        if log is not None:
            log.validation(step, values)
    accelerator.wait_for_everyone()


def _check_finite(accelerator: Accelerator, named: dict[str, nn.Parameter], step: int) -> None:
    broken = [n for n, p in named.items() if not parallel.local(p).isfinite().all()]
    if parallel.any_of(accelerator, bool(broken)):
        raise FloatingPointError(
            f"{broken[0] if broken else 'a weight'} is not finite after step {step}, nothing is "
            "saved: lower train.lr, or use train.precision=no; the last checkpoint is whole"
        )


def _resume(
    run: RunDirectory, state: TrainState, schedule: SampleSchedule, parents: dict[str, str]
) -> dict[str, Any]:
    """Loads the newest checkpoint and returns its ``state.json``, or {} at the start of a run."""
    latest = run.latest()
    directory, past = latest if latest is not None else (run.path, {})
    _check_split(run, past, schedule)
    if latest is None:
        return {}
    changed = [k for k, old in past["parents"].items() if parents.get(k) != old]
    if changed:
        raise CheckpointError(
            f"{directory} builds on other files than there are now ({', '.join(changed)} changed): "
            "put them back, or set train.run to a new directory"
        )
    state.read(directory)
    return past


def _check_split(run: RunDirectory, past: dict[str, Any], schedule: SampleSchedule) -> None:
    """A step has to see as many samples as before, unless only the processes are more or fewer."""
    now, started = schedule.split(), run.started["train"]
    then = past.get("split")
    if then is None:
        then = {k: started[k] for k in ("accumulate", "batch_size")}
        then["first_frame_batch"] = started["first_frame_batch"] or started["batch_size"]
        then["processes"] = now["processes"]
    for size in ("batch_size", "first_frame_batch"):
        each = {k: (then[k], now[k]) for k in (size, "accumulate", "processes")}
        before, after = (math.prod(v[i] for v in each.values()) for i in (0, 1))
        settings = {k: v for k, v in each.items() if v[0] != v[1] and k != "processes"}
        if before != after and settings:
            said = "; ".join(f"train.{k}: {a} -> {b}" for k, (a, b) in settings.items())
            raise CheckpointError(
                f"{run.path} holds a run with another configuration: {said}. Its steps saw "
                f"{before} samples, these {after} ({size} x accumulate x {now['processes']} "
                "processes): make them as many, undo the change, or set train.run to a new "
                "directory"
            )
