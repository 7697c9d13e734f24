"""The picture of a comparison, loss_curves.png."""

import math
import textwrap
from pathlib import Path

from recipes.compare_layouts.differences import excess, labels, statement
from recipes.compare_layouts.judge import QUANTITIES

# Dashes and markers tell the lines apart where their lightness does not.
DASHES = "-", (0, (6, 2)), (0, (1, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 2)), (0, (5, *[1] * 5))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
TITLE_WIDTH = 120  # characters of a line


def draw(comparison: dict, path: Path) -> None:
    """Write the picture, 1600 x 1000 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 8.0), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)
    compared = comparison["reference"] is not None and len(comparison["layouts"]) > 1
    axes = figure.subplots(2 if compared else 1, 2, squeeze=False)
    if compared:
        for column, quantity in enumerate(QUANTITIES):
            _draw_curves(axes[0][column], comparison, "step", quantity)
            _draw_deviations(axes[1][column], comparison, quantity)
    else:
        _draw_curves(axes[0][0], comparison, "step", "loss")
        _draw_curves(axes[0][1], comparison, "tokens", "loss")
    # All panels have the same lines; the deviations add the bound.
    lines, names = axes[0][0].get_legend_handles_labels()
    if compared:
        extra, words = axes[1][0].get_legend_handles_labels()
        lines, names = lines + extra[-1:], names + words[-1:]
    # Long names would push the picture together.
    columns = max(1, min(6, 150 // (12 + max(map(len, names)))))
    style = {"frameon": False, "handlelength": 5}
    figure.legend(lines, names, loc="outside lower center", ncols=columns, **style)
    figure.suptitle(_title(comparison), fontsize=13)
    figure.savefig(path)


def _title(comparison: dict) -> str:
    differing, entries = comparison["differing_flags"], comparison["layouts"]
    lengths = sorted({entry["curve"]["step"][-1] for entry in entries})
    facts = [comparison["recipe"]]
    if "--dtype" not in differing:
        facts.append(comparison["dtype"])
    facts.append(f"{' to '.join(map(str, dict.fromkeys([lengths[0], lengths[-1]])))} steps")
    if "--global-batch-size" not in differing:
        facts.append(f"global batch {entries[0]['global_batch_size']} sequences")
    lines = [", ".join(facts), statement(comparison)]
    lines = lines if differing else [": ".join(lines)]
    bugs = [v["layout"] for v in comparison.get("verdict", ()) if v["finding"]]
    more = [excess(comparison), f"bug by the float64 verdict: {', '.join(bugs)}" if bugs else None]
    return "\n".join(textwrap.fill(line, TITLE_WIDTH) for line in [*lines, *filter(None, more)])


def _styles(comparison: dict) -> list[dict]:
    """A style per layout, in order: dash, marker, and lightness from dark to light."""
    from matplotlib import colormaps

    count = len(comparison["layouts"])
    # Equal curves lie on each other: the first is the widest, and shows on both sides.
    wider = 0.0 if comparison["reference"] is None else 3.0 / max(1, count - 1)
    return [
        {
            "linestyle": DASHES[i % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
            "color": colormaps["viridis"](0.85 * i / max(1, count - 1)),
            "linewidth": 1.5 + wider * (count - 1 - i),
            "markersize": 5.5,
            "zorder": 2 + i / count,
        }
        for i in range(count)
    ]


def _marked(points: int, i: int, count: int) -> tuple[int, int]:
    """Where line i of ``count`` has its markers: about eight, and not where the others have."""
    every = max(1, points // 8)
    return (i * every // count) % every, every


def _draw_curves(axis, comparison: dict, x: str, quantity: str) -> None:
    """Loss or gradient norm over steps or tokens, a line per layout."""
    from matplotlib.ticker import EngFormatter

    layouts, names = comparison["layouts"], labels(comparison)
    for i, (entry, style) in enumerate(zip(layouts, _styles(comparison), strict=True)):
        label, curve = names[i], entry["curve"]
        values = [math.nan if value is None else value for value in curve[quantity]]
        marks = _marked(len(values), i, len(layouts))
        axis.plot(curve[x], values, label=label, markevery=marks, **style)
    if x == "tokens":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xlabel("tokens")
    else:
        _step_axis(axis)
    axis.set_ylabel("loss (nats per token)" if quantity == "loss" else "gradient norm")
    axis.grid(alpha=0.3)


def _step_axis(axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("optimizer step")


def _draw_deviations(axis, comparison: dict, quantity: str) -> None:
    """Deviation from the reference on a log scale; equal numbers lie on the floor, marked 0."""
    base, bound = comparison["reference"], comparison["rounding_bound"]
    curves = [entry["deviation"][quantity] for entry in comparison["layouts"]]
    positive = [value for curve in curves for value in curve["value"] if value]
    positive += [value for value in bound[quantity] if value]
    floor = 10.0 ** (math.floor(math.log10(min(positive, default=1e-16))) - 1)
    for i, (curve, style) in enumerate(zip(curves, _styles(comparison), strict=True)):
        if comparison["layouts"][i]["label"] != base:
            values = [max(value, floor) for value in curve["value"]]
            marks = _marked(len(values), i, len(curves))
            axis.plot(curve["step"], values, markevery=marks, **style | {"linewidth": 1.2})
    causes = " and ".join([comparison["dtype"], *comparison["grad_compressions"]])
    label = f"rounding bound of {causes}"
    axis.plot(bound["step"], bound[quantity], "--", color="black", linewidth=1.5, label=label)
    axis.set_yscale("log")
    axis.set_ylim(floor / 2, 5 * max(positive, default=1e-15))
    decades = round(math.log10(max(positive, default=1e-15) / floor))
    ticks = [floor * 10.0**i for i in range(0, decades + 2, max(1, decades // 6))]
    names = [f"$10^{{{round(math.log10(tick))}}}$" for tick in ticks]
    axis.set_yticks(ticks, ["0", *names[1:]], minor=False)
    axis.minorticks_off()
    axis.axhline(floor, color="black", linewidth=0.6)
    _step_axis(axis)
    # A longer name than that of a layout would not fit; the legend marks the reference.
    whose = base if base in labels(comparison) else "the reference"
    axis.set_ylabel(f"{quantity.replace('_', ' ')}: relative deviation from {whose}")
    axis.grid(alpha=0.3)
