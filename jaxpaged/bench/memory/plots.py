"""The report as PNG files. matplotlib is imported here alone, and late."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.bench.memory import paper

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTS = {
    "held_of_pool": ("hold a token", "#2a6f97"),
    "coming_of_pool": ("taken, token to come", "#a9d6e5"),
    "wasted_of_pool": ("taken, never used", "#e07a5f"),
    "free_of_pool": ("free, or lost between chunks", "#dddddd"),
}


def check_plots(folder: Path | None) -> None:
    """Refuses plots that can't be drawn before anything is measured for them.

    Raises:
      ValueError: matplotlib is missing, or the folder is none, or can't be written to.
    """
    if folder is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plots needs matplotlib, which is not installed: pip install 'jaxpaged[bench]'")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"plots={str(folder)!r} must be a folder that exists and can be written to")


def draw(folder: Path, report: dict[str, Any]) -> list[Path]:
    """Writes four figures for each trace of `report.make` and returns their paths.

    Raises:
      ValueError: a file can't be written.
    """
    paths = []
    for name, trace in report["traces"].items():
        figures = {
            "over_time": _over_time(name, trace["systems"]),
            "parts": _parts(name, trace["systems"]),
            "block_sizes": _block_sizes(name, trace["block_sizes"]),
            "sharing": _sharing(name, trace["sharing"]),
        }
        for kind, figure in figures.items():
            path = folder / f"{name}_{kind}.png"
            try:
                figure.savefig(path, format="png", dpi=150)
            except OSError as error:
                raise ValueError(f"plots={str(path)!r} can't be written: {error}") from error
            paths.append(path)
    return paths


def _figure(width: float = 6.4, height: float = 4.0) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _over_time(name: str, systems: dict[str, Any]) -> Figure:
    figure = _figure(height=6.4)
    held, running = figure.subplots(2, 1, sharex=True)
    for system, usage in systems.items():
        moments = usage["moments"]
        held.plot(moments["step"], [100 * slots / usage["num_slots"] for slots in moments["held"]], label=system)
        running.plot(moments["step"], moments["running"])
    held.set(title=f"{name}: the same requests in the same memory", ylabel="slots of the pool with a token, %")
    held.set_ylim(0, 100)
    running.set(xlabel="step", ylabel="requests running", xscale="log")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure


def _parts(name: str, systems: dict[str, Any]) -> Figure:
    figure = _figure()
    axes = figure.add_subplot(title=f"{name}: what the pool's slots do", xlabel="share of all slots, %")
    labels = list(systems)[::-1]
    left = [0.0] * len(labels)
    for part, (meaning, colour) in _PARTS.items():
        widths = [100 * systems[label][part] for label in labels]
        axes.barh(labels, widths, left=left, label=meaning, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlim(0, 100)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _block_sizes(name: str, sizes: dict[str, Any]) -> Figure:
    figure = _figure()
    axes = figure.add_subplot(title=f"{name}: by block size", xlabel="tokens a block", ylabel="slots with a token, %")
    for share, label in (("held_of_allocated", "of the allocated ones"), ("held_of_pool", "of all")):
        axes.plot(list(sizes), [100 * usage[share] for usage in sizes.values()], "o-", label=label)
    axes.set_ylim(0, 100)
    beside = axes.twinx()
    beside.plot(list(sizes), [u["mean_running"] for u in sizes.values()], "s--", color="grey", label="running (right)")
    beside.set_ylabel("requests running")
    beside.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure


def _sharing(name: str, sharing: dict[str, Any]) -> Figure:
    figure = _figure(width=8.0)
    parallel, beam = figure.subplots(1, 2)
    for axes, title, saved, published in (
        (parallel, "parallel sampling", {"measured": sharing["parallel"]}, paper.PARALLEL),
        (beam, "beam search", sharing["beam"], paper.BEAM),
    ):
        for label, by_width in saved.items():
            _line(axes, label, {int(width): s["saved"] for width, s in by_width.items()}, "o-")
        if name in published:
            _line(axes, "paper", published[name], "k*")
        axes.set(title=f"{name}: {title}", xlabel="sequences a request", xticks=[int(w) for w in sharing["parallel"]])
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    parallel.set_ylabel("blocks saved by sharing, %")
    return figure


def _line(axes: Axes, label: str, shares: dict[int, float], style: str) -> None:
    axes.plot(list(shares), [100 * share for share in shares.values()], style, label=label)
