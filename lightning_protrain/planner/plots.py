"""Draws plans and steps as matplotlib figures, with the extra `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_protrain.planner.lanes import LANES, Work, work_of

GIB = 1 << 30
MISSING = 'Pictures need matplotlib, which is not installed. Run `pip install "lightning-protrain[plots]"`.'
# Colours of kinds of memory, largest kind first.
_COLOURS = ("#3e63dd", "#12a594", "#e5841c", "#8e4ec6", "#d6409f", "#46a758", "#8b8d98")
_POLICIES = {"keep": "#3e63dd", "checkpoint": "#12a594", "selective": "#e5841c", "swap": "#8e4ec6", "": "#c1c8cd"}
_KINDS = {
    "forward": "#3e63dd",
    "backward": "#8e4ec6",
    "recomputation": "#d6409f",
    "optimizer step": "#e5841c",
    "weights": "#12a594",
    "gradients": "#46a758",
}
_RESIDENT, _STREAMED, _LIMIT, _OTHER = "#30845b", "#d9822b", "#ce2c31", "#8b8d98"


@dataclass(frozen=True)
class UnitRow:
    """The policy of one unit and the sizes of its chunks."""

    name: str
    policy: str
    resident: tuple[int, ...]
    streamed: tuple[int, ...]


def axes(ax: Any | None, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return `ax` and its figure; without `ax`, a new figure of pyplot, as torchmetrics does.

    Args:
        ax: Axes to draw on; None: make a figure.
        size: Width and height of a new figure, inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    if ax is not None:
        return ax.get_figure(), ax
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(MISSING) from error
    return plt.subplots(figsize=size, layout="constrained")


def new_figure(size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a figure that pyplot does not manage, with its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def plot_units(rows: Sequence[UnitRow], ax: Any | None = None) -> tuple[Any, Any]:
    """Draw the size of each unit's weights as a bar, with the policy of its activations below."""
    fig, ax = axes(ax, (9, 3.2))
    places = range(len(rows))
    resident, streamed = ([sum(getattr(row, where)) / GIB for row in rows] for where in ("resident", "streamed"))
    ax.bar(places, resident, 0.9, color=_RESIDENT, label="weights on the device")
    ax.bar(places, streamed, 0.9, bottom=resident, color=_STREAMED, label="weights streamed from the host")
    most = max(map(sum, zip(resident, streamed, strict=True)), default=0.0) or 1.0
    for policy in dict.fromkeys(row.policy for row in rows):
        of_policy = [place for place, row in enumerate(rows) if row.policy == policy]
        name = f"activations: {policy}" if policy else "no block"
        ax.bar(
            of_policy, [-0.08 * most] * len(of_policy), 0.9, bottom=-0.03 * most, color=_POLICIES[policy], label=name
        )
    ax.set(title="What lives where", ylabel="GiB of weights", xlabel="units of the model, in order", xticks=[])
    ax.legend(fontsize="small", frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5)
    ax.margins(y=0.1)
    _bare(ax)
    return fig, ax


def plot_phases(
    phases: Mapping[str, Mapping[str, int]], budget: int, title: str, ax: Any | None = None
) -> tuple[Any, Any]:
    """Draw the peak device memory of each phase as a bar, beside the budget.

    Args:
        phases: Bytes by kind of memory, for each phase name.
        budget: Bytes that the device may hold.
        title: Title of the figure.
        ax: Axes to draw on; None: make a figure.
    """
    fig, ax = axes(ax, (9, 3.2))
    most = {term: max(held.get(term, 0) for held in phases.values()) for held in phases.values() for term in held}
    terms = sorted((term for term in most if most[term] > 0), key=lambda term: -most[term])
    num_named = len(terms) if len(terms) <= len(_COLOURS) else len(_COLOURS) - 1
    kinds = [(term.replace("_", " "), [term]) for term in terms[:num_named]] + [("others", terms[num_named:])]
    left, names = [0.0] * len(phases), list(phases)
    for (name, together), colour in zip(kinds, (*_COLOURS, _OTHER), strict=False):
        if together:
            sizes = [sum(held.get(term, 0) for term in together) / GIB for held in phases.values()]
            ax.barh(names, sizes, 0.7, left, color=colour, label=name)
            left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    ax.axvline(budget / GIB, color=_LIMIT, linestyle="--", label=f"budget, {budget / GIB:.1f} GiB")
    ax.invert_yaxis()
    ax.set(title=title, xlabel="GiB of the device at the peak of each phase")
    ax.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _bare(ax)
    return fig, ax


def plot_lanes(spans: Sequence[Work], seconds: float, ax: Any | None = None) -> tuple[Any, Any]:
    """Draw when each resource works in a step of `seconds`."""
    fig, ax = axes(ax, (9, 2.6))
    lanes = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    others = dict.fromkeys(span.what for span in spans if span.what not in _KINDS)
    for what in (*_KINDS, *others):
        named = what
        for place, lane in enumerate(lanes):
            chosen = [span for span in spans if span.what == what and span.lane == lane]
            if chosen:
                bars = [(span.begin, span.end - span.begin) for span in chosen]
                ax.broken_barh(bars, (place - 0.4, 0.8), facecolor=_KINDS.get(what, _OTHER), label=named)
                named = "_"  # matplotlib omits this label from the legend.
    ax.set_yticks(range(len(lanes)), [f"{lane}, {work_of(spans, lane):.3g} s" for lane in lanes])
    ax.invert_yaxis()
    ax.set(xlim=(0, seconds), xlabel="seconds", title=f"A step of {seconds:.3g} s")
    ax.legend(fontsize="small", frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=5)
    _bare(ax)
    return fig, ax


def _bare(ax: Any) -> None:
    ax.spines[["top", "right"]].set_visible(False)
