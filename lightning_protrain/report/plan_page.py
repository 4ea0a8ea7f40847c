"""Shows plans on one HTML page without scripts: placement, the timeline of a step, memory, and throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from lightning_protrain.planner.explain import short_bytes, short_seconds, unit_rows
from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.planner.prediction import Prediction
from lightning_protrain.report.chart_data import Charts
from lightning_protrain.report.plan_report import HERE, figures
from lightning_protrain.report.svg import (
    coloured,
    document,
    draw_curves,
    draw_lanes,
    draw_memory,
    legend,
    memory_legend,
    table,
)

_POLICY_COLOURS = {
    BlockPolicy.KEEP.value: "a",
    BlockPolicy.CHECKPOINT.value: "b",
    BlockPolicy.SELECTIVE.value: "c",
    BlockPolicy.SWAP.value: "d",
    "": "g",
}


def page(
    answers: Mapping[str, Plan | ValueError], basis: str, charts: Mapping[str, Charts | None] | None = None
) -> str:
    """Return the whole HTML page.

    Args:
        answers: Plan for each hardware name, or the error that says why no plan fits.
        basis: Sentence on the batch and the host that the plans are for.
        charts: Figures for the charts of a step, by hardware name; some may be missing.
    """
    parts = [f"<p>{escape(basis)}</p>"]
    if len(answers) > 1:
        parts.append(_comparison(answers))
    parts += [_answer(name, answer, (charts or {}).get(name)) for name, answer in answers.items()]
    return document("Plans", "\n".join(parts))


def _comparison(answers: Mapping[str, Plan | ValueError]) -> str:
    """Return a table that compares the plans."""
    known = {name: plan.prediction for name, plan in answers.items() if isinstance(plan, Plan) and plan.prediction}
    rows = []
    for name in answers:
        prediction = known.get(name)
        rows.append([escape(name), *(["no plan", "", "", ""] if prediction is None else figures(prediction))])
    side_by_side = table(("hardware", "device", "host", "step", "tokens/s"), rows)
    rates = {name: rate for name, prediction in known.items() if (rate := prediction.tokens_per_second)}
    most = max(rates.values(), default=0)
    bars = [_bar_row(name, [("a", rate / most, name)], f"{rate:,.0f}") for name, rate in rates.items()]
    picture = f"<h3>Tokens per second</h3>{''.join(bars)}" if bars else ""
    return f"<h2>Comparison</h2>{side_by_side}{picture}"


def _answer(name: str, answer: Plan | ValueError, charts: Charts | None) -> str:
    title = f"<h2>{escape(name or HERE)}</h2>"
    if isinstance(answer, ValueError):
        return f"{title}<p>{escape(str(answer))}</p>"
    prediction = answer.prediction
    parts = [title]
    if prediction is not None:
        parts += [_tiles(prediction), *(f"<p>{escape(sentence)}</p>" for sentence in prediction.advice)]
    parts.append(_units(answer))
    if prediction is not None:
        moments = () if charts is None else charts.moments
        colours = coloured([*(phase.device for phase in prediction.phases), *(moment.terms for moment in moments)])
        parts.append(_phases(prediction, colours))
        if charts is not None:
            parts.append(_step(prediction, charts, colours))
    text = escape(str(answer.explain()))
    parts.append(f"<details><summary>The plan as text</summary><pre>{text}</pre></details>")
    return "\n".join(parts)


def _units(plan: Plan) -> str:
    """Return a bar for the weights of each unit, with the policy of its activations below."""
    rows = unit_rows(plan)
    most = max((sum(row.resident + row.streamed) for row in rows), default=0) or 1
    columns, policies = [], []
    for row in rows:
        resident, streamed = sum(row.resident), sum(row.streamed)
        where = f"{row.name or '(root)'}: {short_bytes(resident)} resident, {short_bytes(streamed)} streamed"
        parts = [
            f'<i style="height:{100 * nbytes / most:.2f}%;background:var(--{colour})"></i>'
            for colour, nbytes in (("streamed", streamed), ("resident", resident))
            if nbytes
        ]
        columns.append(f'<div title="{escape(where)}">{"".join(parts)}</div>')
        told = f"{row.name or '(root)'}: {row.policy or 'no block'}"
        policies.append(f'<div title="{escape(told)}" style="background:var(--{_POLICY_COLOURS[row.policy]})"></div>')
    used = dict.fromkeys(row.policy for row in rows)
    weights = [("resident", "weights on the device"), ("streamed", "weights streamed from the host")]
    kinds = [(_POLICY_COLOURS[policy], f"activations: {policy}" if policy else "no block") for policy in used]
    return (
        f'<h3>What lives where</h3><p class="quiet">A column for each unit of the model, in order; the highest one has '
        f'{short_bytes(most)} of weights.</p><div class="units">{"".join(columns)}</div>'
        f'<div class="policies">{"".join(policies)}</div>{legend([*weights, *kinds])}'
    )


def _phases(prediction: Prediction, colours: Mapping[str, str]) -> str:
    """Return a bar for the peak device memory of each phase, beside the budget."""
    scale = max(prediction.budget, prediction.device_bytes)
    rows = []
    for phase in prediction.phases:
        parts = [(colours[term], nbytes / scale, term) for term, nbytes in phase.device.items() if nbytes > 0]
        parts.sort(key=lambda part: -part[1])
        rows.append(_bar_row(phase.name, parts, short_bytes(phase.device_bytes)))
    return (
        f'<h3>Memory of the device by phase</h3><p class="quiet">At the peak of each phase; a whole bar is '
        f"{short_bytes(scale)}, the budget is {short_bytes(prediction.budget)}.</p>{''.join(rows)}"
        f"{memory_legend(colours, [phase.device for phase in prediction.phases])}"
    )


def _tiles(prediction: Prediction) -> str:
    """Return the most important figures of a plan as tiles."""
    device, host, step, tokens = figures(prediction)
    shown = {
        "a step": step,
        "tokens per second": tokens,
        f"device, of {short_bytes(prediction.budget)}": device,
        "host": host,
        "bounds the step": prediction.bound,
    }
    tiles = "".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in shown.items() if value)
    return f'<div class="tiles">{tiles}</div>'


def _step(prediction: Prediction, charts: Charts, colours: Mapping[str, str]) -> str:
    """Return the charts of a step: work of each resource and device memory over time, then throughput curves."""
    sentence = f"A step takes {short_seconds(prediction.step_seconds)}, bound by {prediction.bound}."
    if short_seconds(charts.seconds) != short_seconds(prediction.step_seconds):
        sentence += (
            f" Drawn is a GPU that need not share the host's memory with others: {short_seconds(charts.seconds)}."
        )
    return (
        f'<h3>A step in time</h3><p class="quiet">{escape(sentence)} When each resource works, and for how long '
        f"altogether:</p>{draw_lanes(charts.spans, charts.seconds)}"
        f'<h3>Memory of the device over a step</h3><p class="quiet">In time, as above; '
        f"{short_bytes(prediction.budget)} may be used, the dashed line.</p>"
        f"{draw_memory(charts.moments, charts.seconds, prediction.budget, colours)}"
        f"{draw_curves(charts, prediction.budget)}"
    )


def _bar_row(name: str, parts: Sequence[tuple[str, float, str]], value: str) -> str:
    """Return a labelled bar; each part has a colour, a fraction of the bar, and a title."""
    pieces = "".join(
        f'<i style="width:{100 * share:.2f}%;background:var(--{colour})" title="{escape(title.replace("_", " "))}"></i>'
        for colour, share, title in parts
    )
    return f'<div class="row"><span>{escape(name)}</span><div class="bar">{pieces}</div><span>{value}</span></div>'
