"""What is trained, for people to look at: conversations with their trained tokens coloured, and a table of counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightning_protrain.data.report import DatasetReport

Kind = Literal["text", "marker", "media"]
_STYLES: dict[tuple[Kind, bool], str] = {
    ("text", True): "bold green",
    ("text", False): "dim",
    ("marker", True): "bold green reverse",
    ("marker", False): "cyan reverse dim",
    ("media", True): "red reverse",
    ("media", False): "magenta reverse dim",
}


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens that are treated alike.

    Attributes:
        text: What they decode to; for media, the token and how often it stands there.
        trained: Whether they are.
        kind: What they are.
    """

    text: str
    trained: bool
    kind: Kind


@dataclass(frozen=True)
class Shown:
    """One conversation.

    Attributes:
        title: Where it comes from.
        pieces: All of it.
        num_tokens: Its length.
        num_trained: How many tokens are trained.
    """

    title: str
    pieces: tuple[Piece, ...]
    num_tokens: int
    num_trained: int

    @property
    def share(self) -> float:
        """Part of the tokens that are trained."""
        return self.num_trained / max(self.num_tokens, 1)


def show(title: str, tokenizer: Any, ids: NDArray[Any], trained: NDArray[np.bool_], special: NDArray[np.int8]) -> Shown:
    """A conversation in pieces.

    Args:
        title: Where it comes from.
        tokenizer: Decodes.
        ids: Token ids, [length].
        trained: Whether each is trained, [length].
        special: What each is: 0 text, 1 of a marker, 2 media, [length].
    """
    kinds: tuple[Kind, ...] = ("text", "marker", "media")
    pieces = []
    begin, before = 0, ""
    for (kind, is_trained), run in groupby(zip(special.tolist(), trained.tolist(), strict=True)):
        end = begin + len(list(run))
        # Of all that precedes: a tokenizer may drop the space at the begin of what it decodes.
        after = tokenizer.decode(ids[:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = after[len(before) :]
        if kinds[kind] == "media":
            text = _media(tokenizer, ids[begin:end])
        pieces.append(Piece(text, bool(is_trained), kinds[kind]))
        begin, before = end, after
    return Shown(title, tuple(pieces), len(ids), int(trained.sum()))


def _media(tokenizer: Any, ids: NDArray[Any]) -> str:
    runs = [(int(token), len(list(run))) for token, run in groupby(ids.tolist())]
    names = [(str(tokenizer.convert_ids_to_tokens(token)), count) for token, count in runs]
    return "".join(name if count == 1 else f"{name} x {count}" for name, count in names)


def render(shown: Sequence[Shown], reports: Sequence[DatasetReport]) -> Group:
    """For the terminal: trained tokens are green, markers reversed."""
    legend = Text("Trained: ")
    legend.append("text", _STYLES["text", True]).append(" ").append("marker", _STYLES["marker", True])
    legend.append("   not trained: ").append("text", _STYLES["text", False]).append(" ")
    legend.append("marker", _STYLES["marker", False]).append(" ").append("media", _STYLES["media", False])
    legend.append("   \u21b5 a line break that is trained, or of a marker")
    panels = []
    for one in shown:
        body = Text()
        for piece in one.pieces:
            body.append(visible(piece), _STYLES[piece.kind, piece.trained])
        title = f"{one.num_trained} of {one.num_tokens} tokens trained ({one.share:.0%}): {one.title}"
        panels.append(Panel(body, title=Text(title), title_align="left"))
    return Group(legend, *panels, table(reports))


def visible(piece: Piece) -> str:
    """The text, with a sign before each line break that is trained or belongs to a marker: a break has no colour."""
    return piece.text.replace("\n", "\u21b5\n") if piece.trained or piece.kind == "marker" else piece.text


def table(reports: Sequence[DatasetReport]) -> Table:
    """One row for each data set and split."""
    grid = Table(title="Data", title_justify="left")
    for column in (
        "data set",
        "family",
        "kept",
        "dropped",
        "tokens",
        "trained",
        "no end",
        "length min / median / 95 % / max",
    ):
        grid.add_column(column, justify="left" if column in ("data set", "family") else "right", overflow="fold")
    for report in reports:
        low, middle, high, most = report.lengths
        grid.add_row(
            report.name,
            report.family,
            f"{report.num_kept:,}",
            f"{report.num_dropped:,}" + "".join(f"\n{count:,} {why}" for why, count in report.dropped),
            f"{report.num_tokens:,}",
            f"{report.num_trained / max(report.num_tokens, 1):.1%}",
            f"{report.num_unended:,}",
            f"{low:,} / {middle:,} / {high:,} / {most:,}",
        )
    return grid
