"""The report: one table, ``metrics.json`` and ``report.png``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from animegamer.atomic import write_bytes, write_text
from animegamer.evaluation.benchmark import SetResult
from animegamer.evaluation.contact_sheet import spread
from animegamer.evaluation.metrics import Figure, confusion
from animegamer.evaluation.truth import Outcome

matplotlib.use("Agg")

_BARS = (
    "character",
    "motion",
    "background",
    "time_of_day",
    "acc_f",
    "acc_s",
    "cross_film",
    "unseen_character",
    "unseen_motion",
    "hidden_attributes",
    "hidden_attributes_window_1",
    "hidden_attributes_beyond_window",
    "sharpness",
)


def table(figures: dict[str, Figure]) -> str:
    """The figures as lines of text: value, 95 % interval, n, chance and ceiling."""
    head = ("figure", "value", "95 % interval", "n", "chance", "ceiling")
    rows = [head]
    for name, figure in figures.items():
        interval = "-"
        if figure.low is not None and figure.high is not None:
            interval = f"{figure.low:.3f} to {figure.high:.3f}"
        rows.append(
            (
                name,
                _number(figure.value),
                interval,
                str(figure.n),
                _number(figure.chance),
                _number(figure.ceiling),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def probes_table(accuracy: dict[str, dict[str, float]]) -> str:
    """Accuracy of each probe head on held-out drawn and on reconstructed shots."""
    lines = ["probe head   drawn  reconstructed"]
    for head, value in accuracy["drawn"].items():
        lines.append(f"{head:12s} {value:.3f}  {accuracy['reconstructed'][head]:.3f}")
    return "\n".join(lines)


def levels_text(rows: Sequence[dict[str, Any]]) -> str:
    """Table of the motion levels."""
    lines = ["true level    n  acc_f  ceiling  mean level generated"]
    for row in rows:
        lines.append(
            f"{row['level']:10d} {row['n']:4d}  {_number(row['acc_f'])}    "
            f"{_number(row['ceiling'])}  {_number(row['mean_level_generated'])}"
        )
    return "\n".join(lines)


def write_metrics(path: str | Path, figures: dict[str, Figure], more: dict[str, Any]) -> None:
    """Writes ``metrics.json``: figures by name, then everything else that is worth keeping."""
    tree = {name: figure.as_dict() for name, figure in figures.items()}
    write_text(path, json.dumps({**tree, **more}, indent=1, ensure_ascii=False) + "\n")


def draw_report(
    path: str | Path,
    figures: dict[str, Figure],
    result: SetResult,
    levels: Sequence[dict[str, Any]],
    drawn: Sequence[np.ndarray],
    generated: Sequence[np.ndarray],
) -> None:
    """Writes ``report.png``: bars with ceilings, confusions, levels, worst and sample shots.

    Args:
        path: the PNG.
        figures: all figures.
        result: the main set.
        levels: from ``benchmark.levels_table``.
        drawn: its true shots, uint8 (F, H, W, 3) each.
        generated: its generated shots.
    """
    import io

    from matplotlib import pyplot as plt

    page = plt.figure(figsize=(18, 22), layout="constrained")
    grid = page.add_gridspec(4, 4, height_ratios=(1, 1.1, 1.2, 1.2))
    _bars(page.add_subplot(grid[0, :3]), figures)
    _intensity(page.add_subplot(grid[0, 3]), levels)
    pairs = [o for o in result.given if o.given is not None]
    _matrix(page.add_subplot(grid[1, 0]), "characters", _character_pairs(pairs))
    for column, (title, name) in enumerate(
        (("motion", "motion"), ("motion level", "level"), ("place", "place")), 1
    ):
        _matrix(
            page.add_subplot(grid[1, column]),
            title,
            [(str(getattr(o.truth, name)), str(getattr(o.given, name))) for o in pairs],
        )
    worst = worst_rows(result.given, 12)
    _shots(
        page.add_subplot(grid[2, :]),
        "worst shots (drawn | generated)",
        worst,
        drawn,
        generated,
        result.given,
    )
    sample = spread(len(result.given), 12)
    _shots(
        page.add_subplot(grid[3, :]),
        "unpicked shots (drawn | generated)",
        sample,
        drawn,
        generated,
        result.given,
    )
    content = io.BytesIO()
    page.savefig(content, dpi=80, format="png")
    plt.close(page)
    write_bytes(path, content.getvalue())


def worst_rows(outcomes: Sequence[Outcome], count: int) -> list[int]:
    """The rows with most wrong, the first of equals first."""

    def faults(outcome: Outcome) -> int:
        true, given = outcome.truth, outcome.given
        if given is None:
            return 99
        wrong = [
            given.characters != true.characters,
            given.motion != true.motion,
            given.place != true.place,
            given.time_of_day != true.time_of_day,
        ]
        return 2 * sum(wrong) + abs(given.level - true.level)

    order = sorted(range(len(outcomes)), key=lambda row: (-faults(outcomes[row]), row))
    return order[:count]


def _character_pairs(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """Whom a probe saw for each named character: itself, or those who should not be there."""
    pairs: list[tuple[str, str]] = []
    for o in outcomes:
        assert o.given is not None
        strangers = sorted(o.given.characters - o.truth.characters) or ["nobody"]
        for name in sorted(o.truth.characters):
            found = [name] if name in o.given.characters else strangers
            pairs.extend((name, other) for other in found)
    return pairs


def _bars(axes: Any, figures: dict[str, Figure]) -> None:
    shown = [
        (name, figures[name])
        for name in _BARS
        if name in figures and figures[name].value is not None
    ]
    places = np.arange(len(shown))
    values = np.array([f.value for _, f in shown], dtype=float)
    low = np.array([f.low for _, f in shown], dtype=float)
    high = np.array([f.high for _, f in shown], dtype=float)
    axes.bar(places, values, color="#5a86c8", label="generated")
    around = np.clip([values - low, high - values], 0, None)
    axes.errorbar(places, values, around, fmt="none", ecolor="black", capsize=3)
    for place, (_, figure) in zip(places, shown, strict=True):
        for height, colour in ((figure.ceiling, "#c03030"), (figure.chance, "#888888")):
            if height is not None:
                axes.hlines(height, place - 0.45, place + 0.45, colour, lw=2)
    axes.plot([], [], color="#c03030", label="ceiling (drawn, first stage)")
    axes.plot([], [], color="#888888", label="commonest answer")
    axes.set_xticks(places, [name.replace("_", "\n") for name, _ in shown], fontsize=8)
    axes.set_ylim(0, 1.2)
    axes.legend(loc="upper left", ncols=3, fontsize=8)
    axes.set_title("Figures with 95 % intervals over games")


def _intensity(axes: Any, levels: Sequence[dict[str, Any]]) -> None:
    numbers = [row["level"] for row in levels]
    for key, label, style in (("acc_f", "generated", "o-"), ("ceiling", "ceiling", "s--")):
        axes.plot(
            numbers,
            [np.nan if row[key] is None else row[key] for row in levels],
            style,
            label=label,
        )
    axes.set(xticks=numbers, ylim=(0, 1.05), xlabel="true motion level", title="ACC-F by level")
    axes.legend(fontsize=8)


def _matrix(axes: Any, title: str, pairs: Sequence[tuple[str, str]]) -> None:
    names = sorted({name for pair in pairs for name in pair})
    shares = confusion(pairs, names)
    axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            if share >= 0.005:
                axes.text(
                    column,
                    row,
                    f"{100 * share:.0f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if share > 0.5 else "black",
                )
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(title=f"{title}: truth in rows, generated, %")


def _shots(
    axes: Any,
    title: str,
    rows: Sequence[int],
    drawn: Sequence[np.ndarray],
    generated: Sequence[np.ndarray],
    outcomes: Sequence[Outcome],
    columns: int = 3,
) -> None:
    axes.set_axis_off()
    axes.set_title(title)
    if not rows:
        return
    height, width = np.asarray(drawn[rows[0]]).shape[1:3]
    line = 12
    tall = -(-len(rows) // columns)
    sheet = np.full((tall * (height + line), columns * (4 * width + 8), 3), 255, np.uint8)
    for place, row in enumerate(rows):
        pair = (np.asarray(drawn[row]), np.asarray(generated[row]))
        strip = np.concatenate([shot[f] for shot in pair for f in (0, len(shot) // 2)], 1)
        top = place // columns * (height + line) + line
        left = place % columns * (4 * width + 8)
        sheet[top : top + height, left : left + 4 * width] = strip
        axes.text(left, top - 2, caption(outcomes[row]), fontsize=6)
    axes.imshow(sheet, interpolation="nearest")


def caption(outcome: Outcome) -> str:
    """What was asked for, and what the judges saw where that differs."""
    true, given = outcome.truth, outcome.given
    asked = (
        f"{' & '.join(sorted(true.characters))}, {true.motion}, {true.time_of_day} "
        f"{true.place}, level {true.level}"
    )
    if given is None:
        return f"{asked}: MISSING"
    wrong = []
    if given.characters != true.characters:
        wrong.append(" & ".join(sorted(given.characters)) or "nobody")
    for name in ("motion", "place", "time_of_day", "level"):
        if getattr(given, name) != getattr(true, name):
            wrong.append(str(getattr(given, name)))
    return f"{asked}; seen: {', '.join(wrong)}" if wrong else asked
