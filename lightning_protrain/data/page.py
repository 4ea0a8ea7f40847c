"""A page of HTML that shows which tokens are trained; one file, no script, nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from lightning_protrain.data.preview import Piece, Shown, visible
from lightning_protrain.data.report import DatasetReport


def page(shown: Sequence[Shown], reports: Sequence[DatasetReport]) -> str:
    """The whole page.

    Args:
        shown: Conversations.
        reports: Of the data sets.
    """
    style = files("lightning_protrain.data").joinpath("page.css").read_text(encoding="utf-8")
    articles = "\n".join(map(_article, shown))
    legend = " ".join(
        f'<span class="{classes}">{name}</span>'
        for classes, name in (
            ("trained", "trained text"),
            ("marker trained", "trained marker"),
            ("marker", "marker"),
            ("media", "image"),
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>What is trained</title>'
        f"<style>{style}</style></head>\n<body><h1>What is trained</h1>\n{_table(reports)}\n{_notes(reports)}\n"
        f"<p>{legend}; all other text is read, and not trained. &#8629; stands for a line break that is trained, or of "
        f"a marker.</p>\n{articles}\n</body></html>\n"
    )


def _article(one: Shown) -> str:
    body = "".join(map(_span, one.pieces))
    return (
        f"<article><h2>{escape(one.title)} <small>{one.num_trained} of {one.num_tokens} tokens trained "
        f'({one.share:.0%})</small></h2><div class="bar"><i style="width:{100 * one.share:.1f}%"></i></div>'
        f"<pre>{body}</pre></article>"
    )


def _span(piece: Piece) -> str:
    text = escape(visible(piece)).replace("\u21b5", "&#8629;")
    classes = [
        name for name in (piece.kind if piece.kind != "text" else "", "trained" if piece.trained else "") if name
    ]
    return f'<span class="{" ".join(classes)}">{text}</span>' if classes else text


def _table(reports: Sequence[DatasetReport]) -> str:
    head = ("data set", "family", "kept", "dropped", "tokens", "trained", "no end", "length: min, median, 95 %, max")
    rows = []
    for report in reports:
        dropped = "".join(f"<br>{number:,} {escape(why)}" for why, number in report.dropped)
        cells = (
            escape(report.name),
            escape(report.family),
            f"{report.num_kept:,}",
            f"{report.num_dropped:,}{dropped}",
            f"{report.num_tokens:,}",
            f"{report.num_trained / max(report.num_tokens, 1):.1%}",
            f"{report.num_unended:,}",
            ", ".join(f"{length:,}" for length in report.lengths),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{''.join(rows)}</table>"


def _notes(reports: Sequence[DatasetReport]) -> str:
    """Return the knobs of each data set, and its first rows that are dropped."""
    parts = []
    for report in reports:
        rows = [escape(row) for row in report.dropped_rows]
        unnamed = report.num_dropped - len(rows)
        rows += [f"{unnamed:,} more"] if rows and unnamed > 0 else []
        listed = "".join(f"<li>{row}</li>" for row in rows)
        dropped = (
            f"<details><summary>Dropped: {report.num_dropped:,}</summary><ul>{listed}</ul></details>" if rows else ""
        )
        parts.append(f"<p><b>{escape(report.name)}</b>: {escape(report.knobs)}</p>{dropped}")
    return "\n".join(parts)
