"""Shows the trained tokens of conversations, in a terminal and on an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightning_protrain.data.sources.dataset import DatasetReport


def page(shown: Sequence[PreviewedConversation], reports: Sequence[DatasetReport]) -> str:
    """Return an HTML page that shows conversations and the reports of their data sets."""
    style = files("lightning_protrain.data.batches").joinpath("page.css").read_text(encoding="utf-8")
    articles = "\n".join(map(_article, shown))
    legend = " ".join(
        f'<span class="{classes}">{name}</span>'
        for classes, name in (
            ("trained", "trained text"),
            ("marker trained", "trained marker"),
            ("marker", "marker"),
            ("media", "image, audio or video"),
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>What is trained</title>'
        f"<style>{style}</style></head>\n<body><h1>What is trained</h1>\n{_table(reports)}\n{_notes(reports)}\n"
        f"<p>{legend}; all other text is read, and not trained. &#8629; stands for a line break that is trained, or of "
        f"a marker.</p>\n{articles}\n</body></html>\n"
    )


def _article(shown: PreviewedConversation) -> str:
    body = "".join(map(_span, shown.pieces))
    return (
        f"<article><h2>{escape(shown.title)} <small>{shown.num_trained} of {shown.num_tokens} tokens trained "
        f'({shown.share:.0%})</small></h2><div class="bar"><i style="width:{100 * shown.share:.1f}%"></i></div>'
        f"{_images(shown)}<pre>{body}</pre></article>"
    )


def _images(shown: PreviewedConversation) -> str:
    images = "".join(f'<img src="{escape(url)}" alt="image {n}">' for n, url in enumerate(shown.thumbnails, 1))
    return f"<p>{images}</p>" if images else ""


def _span(piece: TokenSpan) -> str:
    text = escape(visible(piece)).replace("\u21b5", "&#8629;")
    classes = [
        name for name in (piece.kind if piece.kind != "text" else "", "trained" if piece.trained else "") if name
    ]
    return f'<span class="{" ".join(classes)}">{text}</span>' if classes else text


LENGTHS = "length: min, median, 95 %, max"


def _table(reports: Sequence[DatasetReport]) -> str:
    head = ("data set", "family", "kept", "dropped", "tokens", "trained", "without end", LENGTHS)
    rows = []
    for report in reports:
        names = (escape(report.name), escape(report.family))
        cells = (*names, *(escape(cell).replace("\n", "<br>") for cell in _counts(report)))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{''.join(rows)}</table>"


def _counts(report: DatasetReport) -> tuple[str, ...]:
    """Return the cells of a report after its names; a cell may have several lines."""
    return (
        "\n".join((f"{report.num_kept:,}", *report.media)),
        "\n".join((f"{report.num_dropped:,}", *(f"{count:,} {why}" for why, count in report.dropped))),
        f"{report.num_tokens:,}",
        f"{report.num_trained / max(report.num_tokens, 1):.1%}",
        f"{report.num_unended:,}",
        ", ".join(f"{length:,}" for length in report.lengths),
    )


def _notes(reports: Sequence[DatasetReport]) -> str:
    """Return HTML with the settings and the first dropped rows of each data set."""
    parts = []
    for report in reports:
        rows = [escape(row) for row in report.dropped_rows]
        unnamed = report.num_dropped - len(rows)
        rows += [f"{unnamed:,} more"] if rows and unnamed > 0 else []
        listed = "".join(f"<li>{row}</li>" for row in rows)
        dropped = (
            f"<details><summary>Dropped: {report.num_dropped:,}</summary><ul>{listed}</ul></details>" if rows else ""
        )
        remarks = escape(report.remarks() + " " + report.knobs)
        parts.append(f"<p><b>{escape(report.name)}</b>:{remarks}</p>{dropped}")
    return "\n".join(parts)


Kind = Literal["text", "marker", "media"]
# Delimiters of trained text in a terminal without colours.
_OPENING, _CLOSING = "[[", "]]"
_STYLES: dict[tuple[Kind, bool], str] = {
    ("text", True): "bold green",
    ("text", False): "dim",
    ("marker", True): "bold green reverse",
    ("marker", False): "cyan reverse dim",
    ("media", True): "red reverse",
    ("media", False): "magenta reverse dim",
}


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of one kind that are all trained, or all untrained.

    Attributes:
        text: Decoded text; for media, the token and its number of repetitions, such as "<image> x 64".
        trained: True if the tokens are trained.
        kind: Kind of the tokens.
    """

    text: str
    trained: bool
    kind: Kind


@dataclass(frozen=True)
class PreviewedConversation:
    """A conversation divided into spans for display.

    Attributes:
        title: Heading: data set and number of the conversation.
        pieces: Spans that together have all tokens of the conversation.
        num_tokens: Number of tokens.
        num_trained: Number of trained tokens.
        thumbnails: Small versions of its images, as `data:` URLs.
    """

    title: str
    pieces: tuple[TokenSpan, ...]
    num_tokens: int
    num_trained: int
    thumbnails: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Fraction of the conversation's tokens that are trained."""
        return self.num_trained / max(self.num_tokens, 1)


def show(
    title: str, tokenizer: Any, ids: NDArray[Any], trained: NDArray[np.bool_], special: NDArray[np.int8]
) -> PreviewedConversation:
    """Divide a conversation into spans for display.

    Args:
        title: Heading of the conversation.
        tokenizer: Tokenizer that decodes the ids.
        ids: Token ids, of shape [tokens].
        trained: True for trained tokens, of shape [tokens].
        special: Kind of each token (0 text, 1 marker, 2 media), of shape [tokens].
    """
    kinds: tuple[Kind, ...] = ("text", "marker", "media")
    pieces = []
    begin, decoded = 0, ""
    for (kind, is_trained), run in groupby(zip(special.tolist(), trained.tolist(), strict=True)):
        end = begin + len(list(run))
        # Decode from the first token on: a tokenizer may drop a space at the beginning of a decoded text.
        after = tokenizer.decode(ids[:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = after[len(decoded) :]
        if kinds[kind] == "media":
            text = _media(tokenizer, ids[begin:end])
        pieces.append(TokenSpan(text, bool(is_trained), kinds[kind]))
        begin, decoded = end, after
    return PreviewedConversation(title, tuple(pieces), len(ids), int(trained.sum()))


def _media(tokenizer: Any, ids: NDArray[Any]) -> str:
    runs = [(int(token), len(list(run))) for token, run in groupby(ids.tolist())]
    names = [(str(tokenizer.convert_ids_to_tokens(token)), count) for token, count in runs]
    return "".join(name if count == 1 else f"{name} x {count}" for name, count in names)


def render(shown: Sequence[PreviewedConversation], reports: Sequence[DatasetReport]) -> Group:
    """Return conversations and reports for a terminal; trained tokens are green, or in brackets without colours."""
    return Group(_Legend(), *map(_Conversation, shown), table(reports), notes(reports))


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


class _Legend:
    """A legend of the colours, or of the brackets in a terminal without colours."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if _has_colours(console):
            legend = Text("Trained: ")
            legend.append("text", _STYLES["text", True]).append(" ").append("marker", _STYLES["marker", True])
            legend.append("   not trained: ").append("text", _STYLES["text", False]).append(" ")
            legend.append("marker", _STYLES["marker", False]).append(" ").append("media", _STYLES["media", False])
        else:
            legend = Text(f"Trained: {_OPENING}text in double brackets{_CLOSING}, and nothing else")
        yield legend.append("   \u21b5 line break")


@dataclass(frozen=True)
class _Conversation:
    """A panel that shows one conversation in a terminal."""

    shown: PreviewedConversation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        body, shown = Text(), self.shown
        has_colours = _has_colours(console)
        for is_trained, run in groupby(shown.pieces, key=lambda piece: piece.trained):
            marked = is_trained and not has_colours
            body.append(_OPENING if marked else "")
            for piece in run:
                body.append(visible(piece), _STYLES[piece.kind, piece.trained] if has_colours else "")
            body.append(_CLOSING if marked else "")
        title = f"{shown.num_trained} of {shown.num_tokens} tokens trained ({shown.share:.0%}): {shown.title}"
        yield Panel(body, title=Text(title), title_align="left")


def notes(reports: Sequence[DatasetReport]) -> Text:
    """Return remarks, the first dropped rows, and the settings of each data set."""
    lines, alike = [], dict[str, list[str]]()
    for report in reports:
        alike.setdefault(f"chat format {report.family}, {report.knobs}", []).append(report.name)
        lines += [f"{report.name}:{report.remarks()}"] if report.remarks() else []
        lines += [f"{report.name}, dropped: {row}" for row in report.dropped_rows]
        unnamed = report.num_dropped - len(report.dropped_rows)
        lines += [f"{report.name}, dropped: {unnamed:,} more"] if unnamed > 0 and report.dropped_rows else []
    return Text("\n".join([*lines, *(f"{'; '.join(names)}: {knobs}" for knobs, names in alike.items())]))


def visible(piece: TokenSpan) -> str:
    """Return the text of a span; line breaks get a symbol, as colour cannot show them, if trained or in a marker."""
    return piece.text.replace("\n", "\u21b5\n") if piece.trained or piece.kind == "marker" else piece.text


def table(reports: Sequence[DatasetReport]) -> Table:
    """Return a table for a terminal with a row for each data set and split."""
    title = LENGTHS.replace("length", "Data; lengths")
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("data set", "kept", "dropped", "tokens", "trained", "no end", "lengths"):
        grid.add_column(column, justify="left" if column == "data set" else "right", overflow="fold")
    for report in reports:
        grid.add_row(report.name, *_counts(report))
    return grid
