"""Shows plans on one HTML page without scripts: what lives where, memory by phase, and what a step waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from lightning_protrain.planner.explain import short_bytes, short_seconds, unit_rows
from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.planner.prediction import Prediction
from lightning_protrain.strategy.plan_report import HERE

# Names of the colours in plan_page.css: a picture shows at most as many kinds of things.
_COLOURS = "abcdefg"
_POLICY_COLOURS = {
    BlockPolicy.KEEP.value: "a",
    BlockPolicy.CHECKPOINT.value: "b",
    BlockPolicy.SELECTIVE.value: "c",
    BlockPolicy.SWAP.value: "d",
    "": "g",
}


def page(answers: Mapping[str, Plan | ValueError], basis: str) -> str:
    """Return the whole page.

    Args:
        answers: Plans, or why there is none, by name of the hardware.
        basis: Sentence on the batch and the host that the plans are for.
    """
    style = files("lightning_protrain.strategy").joinpath("plan_page.css").read_text(encoding="utf-8")
    parts = [f"<p>{escape(basis)}</p>"]
    if len(answers) > 1:
        parts.append(_comparison(answers))
    parts += [_answer(name, answer) for name, answer in answers.items()]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Plans</title>'
        f"<style>{style}</style></head>\n<body><h1>Plans</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _comparison(answers: Mapping[str, Plan | ValueError]) -> str:
    """Return the plans side by side."""
    known = {name: plan.prediction for name, plan in answers.items() if isinstance(plan, Plan) and plan.prediction}
    rows = []
    for name in answers:
        one = known.get(name)
        cells = ["no plan", "", "", ""]
        if one is not None:
            rate = one.tokens_per_second
            tokens = "" if rate is None else f"{rate:,.0f}"
            cells = [
                short_bytes(one.device_bytes),
                short_bytes(one.host_bytes),
                short_seconds(one.step_seconds),
                tokens,
            ]
        rows.append([escape(name), *cells])
    table = _table(("hardware", "device", "host", "step", "tokens/s"), rows)
    most = max((one.tokens_per_second or 0 for one in known.values()), default=0)
    bars = [
        _bar_row(name, [("c", (one.tokens_per_second or 0) / most, name)], f"{one.tokens_per_second:,.0f}")
        for name, one in known.items()
        if one.tokens_per_second
    ]
    picture = f"<h3>Tokens per second</h3>{''.join(bars)}" if bars else ""
    return f"<h2>Comparison</h2>{table}{picture}"


def _answer(name: str, answer: Plan | ValueError) -> str:
    title = f"<h2>{escape(name or HERE)}</h2>"
    if isinstance(answer, ValueError):
        return f"{title}<p>{escape(str(answer))}</p>"
    prediction = answer.prediction
    parts = [title, _units(answer)]
    if prediction is not None:
        parts += [_phases(prediction), _resources(prediction)]
        parts += [f"<p>{escape(sentence)}</p>" for sentence in prediction.advice]
    text = escape(str(answer.explain()))
    parts.append(f"<details><summary>The plan as text</summary><pre>{text}</pre></details>")
    return "\n".join(parts)


def _units(plan: Plan) -> str:
    """Return a column for each unit, as high as its weights, and the policy of its activations below."""
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
    legend = [("resident", "weights on the device"), ("streamed", "weights streamed from the host")]
    kinds = [(_POLICY_COLOURS[policy], f"activations: {policy}" if policy else "no block") for policy in used]
    return (
        f'<h3>What lives where</h3><p class="quiet">A column for each unit of the model, in order; the highest one has '
        f'{short_bytes(most)} of weights.</p><div class="units">{"".join(columns)}</div>'
        f'<div class="policies">{"".join(policies)}</div>{_legend([*legend, *kinds])}'
    )


def _phases(prediction: Prediction) -> str:
    """Return a bar for each phase: what the device holds at its peak, beside the budget."""
    largest = sorted(
        {term for phase in prediction.phases for term in phase.device},
        key=lambda term: -max(phase.device.get(term, 0) for phase in prediction.phases),
    )
    named = largest[: len(_COLOURS) - 1]
    colours = dict(zip(named, _COLOURS, strict=False))
    scale = max(prediction.budget, prediction.device_bytes)
    rows = []
    for phase in prediction.phases:
        parts = [(colours.get(term, "g"), nbytes / scale, term) for term, nbytes in phase.device.items() if nbytes > 0]
        parts.sort(key=lambda part: -part[1])
        rows.append(_bar_row(phase.name, parts, short_bytes(phase.device_bytes)))
    legend = [(colours[term], term.replace("_", " ")) for term in named]
    if len(largest) > len(named):
        legend.append(("g", "others"))
    return (
        f'<h3>Memory of the device by phase</h3><p class="quiet">At the peak of each phase; a whole bar is '
        f"{short_bytes(scale)}, the budget is {short_bytes(prediction.budget)}.</p>{''.join(rows)}{_legend(legend)}"
    )


def _resources(prediction: Prediction) -> str:
    """Return a bar for each resource: how much of a step it works."""
    scale = max(prediction.step_seconds, *prediction.busy.values())
    rows = [
        _bar_row(name, [("e" if name == prediction.bound else "c", seconds / scale, name)], short_seconds(seconds))
        for name, seconds in prediction.busy.items()
    ]
    rate = prediction.tokens_per_second
    tokens = "" if rate is None else f", {rate:,.0f} tokens per second"
    said = f"A step takes {short_seconds(prediction.step_seconds)}{tokens}, bound by the {prediction.bound}."
    return (
        f'<h3>What a step waits for</h3><p class="quiet">{escape(said)} How long each resource works in it, hidden or '
        f"not:</p>{''.join(rows)}"
    )


def _bar_row(name: str, parts: Sequence[tuple[str, float, str]], value: str) -> str:
    """Return a named bar of parts; each has a colour, a share of the whole bar, and a title."""
    pieces = "".join(
        f'<i style="width:{100 * share:.2f}%;background:var(--{colour})" title="{escape(title.replace("_", " "))}"></i>'
        for colour, share, title in parts
    )
    return f'<div class="row"><span>{escape(name)}</span><div class="bar">{pieces}</div><span>{value}</span></div>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    spans = (f'<span><i style="background:var(--{colour})"></i>{escape(text)}</span>' for colour, text in entries)
    return f'<p class="legend">{"".join(spans)}</p>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{name}</th>" for name in head)}</tr>{cells}</table></div>'
