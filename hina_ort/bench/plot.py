"""How much of what the machine can do each engine reaches, over the number of tokens."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from hina_ort.bench import show
from hina_ort.files import UsageError

_COLOURS = {"hina": "#c2410c", "ort": "#1d4ed8", "torch": "#7c3aed", "vllm": "#047857"}


def import_matplotlib(option: str = "--plot") -> Any:
    """matplotlib's pyplot, drawing to files; UsageError, saying what to install, when it is missing for `option`."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UsageError(f"{option} needs matplotlib: pip install hina-ort[bench]") from error


def plot_layer(result: dict[str, Any], path: Path) -> None:
    """Write the plot of a result of `bench_layer` as PNG."""
    pyplot = import_matplotlib()
    figure, axes = pyplot.subplots(figsize=(8, 4.8), dpi=150)
    tokens = [cell["tokens"] for cell in result["cells"]]
    ends = []
    for engine in result["engines"]:
        shares = [100 * cell["engines"][engine["name"]]["limit_share"] for cell in result["cells"]]
        own = engine["name"] == "hina"
        axes.plot(
            tokens,
            shares,
            color=_COLOURS[engine["name"]],
            linewidth=2.6 if own else 1.6,
            marker="o",
            markersize=5 if own else 3.5,
            zorder=3 if own else 2,
        )
        ends.append((shares[-1], engine["label"], _COLOURS[engine["name"]], own))
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.minorticks_off()
    top = max(105.0, *(1.08 * 100 * v["limit_share"] for cell in result["cells"] for v in cell["engines"].values()))
    axes.set_ylim(0, top)
    axes.axhline(100, color="#6b7280", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        "limit of the machine: memory or arithmetic",
        (tokens[0], 100),
        xytext=(0, -11),
        fontsize=8,
        textcoords="offset points",
        color="#6b7280",
    )
    for (share, label, colour, own), height in zip(ends, _spread([e[0] for e in ends], 0.055 * top), strict=True):
        axes.annotate(
            label,
            (tokens[-1], share),
            xytext=(1.015, height / top),
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            fontweight="bold" if own else "normal",
            va="center",
            annotation_clip=False,
        )
    axes.set_xlabel("tokens")
    axes.set_ylabel("share of the machine's limit, %")
    axes.set_title(show.title(result), fontsize=10, loc="left", pad=18)
    axes.text(0, 1.02, show.limits(result), transform=axes.transAxes, fontsize=7.5, color="#6b7280")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8, zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    figure.savefig(path, format="png", bbox_inches="tight")
    pyplot.close(figure)


def _spread(heights: list[float], gap: float) -> list[float]:
    """Heights of labels, at least `gap` apart and near to those given."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = dict.fromkeys(order, 0.0)
    last = float("-inf")
    for i in order:
        last = placed[i] = max(heights[i], last + gap)
    return [placed[i] for i in range(len(heights))]
