"""What became of a data set: counts for the log, the terminal and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from rich.progress import Progress


@dataclass(frozen=True)
class DatasetReport:
    """One data set in one split.

    Attributes:
        name: Of the data set, and the split.
        family: Whose role boundaries are used.
        num_kept: Conversations that are used.
        dropped: Why others are not, and how many.
        num_tokens: Of what is used.
        num_trained: Tokens with a loss.
        num_unended: Trained turns without a terminator.
        num_doubtful: Conversations that are kept although their turns and messages differ.
        lengths: Of the conversations: smallest, median, 95th percentile, largest.
        num_unwritten: Conversations of which the chat template leaves out reasoning.
        num_cut: Those of `num_unended` that were cut at `max_length`.
        knobs: What is trained, as the user has set it.
        dropped_rows: Where the first rows that are not used come from, and why they are not.
    """

    name: str
    family: str
    num_kept: int
    dropped: tuple[tuple[str, int], ...] = ()
    num_tokens: int = 0
    num_trained: int = 0
    num_unended: int = 0
    num_doubtful: int = 0
    lengths: tuple[int, int, int, int] = field(default=(0, 0, 0, 0))
    num_unwritten: int = 0
    num_cut: int = 0
    knobs: str = ""
    dropped_rows: tuple[str, ...] = ()

    @property
    def num_dropped(self) -> int:
        """Conversations that are not used."""
        return sum(count for _, count in self.dropped)

    def describe(self) -> str:
        """One sentence for the log."""
        share = self.num_trained / max(self.num_tokens, 1)
        why = ", ".join(f"{count} {reason}" for reason, count in self.dropped)
        doubtful = f" {self.num_doubtful} are kept although their mask is in doubt." if self.num_doubtful else ""
        unended = ""
        if self.num_cut:
            turns, whose = ("turn was", "its") if self.num_cut == 1 else ("turns were", "their")
            unended += f" {self.num_cut:,} assistant {turns} cut at max_length, so {whose} end token is not trained."
        if self.num_unended > self.num_cut:
            num = self.num_unended - self.num_cut
            turns = "turn has" if num == 1 else "turns have"
            unended += f" {num:,} trained {turns} no end token, because the chat template writes none there."
        unwritten = ""
        if self.num_unwritten:
            unwritten = f" The chat template leaves out reasoning of {self.num_unwritten} conversations."
        return (
            f"{self.name}: {self.num_kept} conversations, {self.num_tokens} tokens, {share:.1%} of them trained; "
            f"{self.num_dropped} dropped{f' ({why})' if why else ''}.{unended}{doubtful}{unwritten}"
        )


def count(
    name: str,
    family: str,
    lengths: Sequence[int],
    num_trained: int,
    num_unended: int,
    dropped: Iterable[str] | Mapping[str, int],
    num_doubtful: int = 0,
    num_unwritten: int = 0,
    num_cut: int = 0,
) -> DatasetReport:
    """Adds up.

    Args:
        name: Of the data set, and the split.
        family: Whose role boundaries are used.
        lengths: Tokens of each conversation that is used.
        num_trained: Tokens with a loss.
        num_unended: Trained turns without a terminator.
        dropped: A reason for each conversation that is not used, or how many there are for each reason.
        num_doubtful: Conversations whose mask is in doubt.
        num_unwritten: Conversations of which the chat template leaves out reasoning.
        num_cut: Trained turns that were cut.
    """
    reasons = Counter(dropped).most_common()
    spread = (0, 0, 0, 0)
    if lengths:
        low, middle, high, most = np.percentile(lengths, (0, 50, 95, 100), method="nearest")
        spread = (int(low), int(middle), int(high), int(most))
    return DatasetReport(
        name,
        family,
        len(lengths),
        tuple(reasons),
        sum(lengths),
        num_trained,
        num_unended,
        num_doubtful,
        spread,
        num_unwritten,
        num_cut,
    )


def progress_bar(total: int, show_from: int) -> Progress:
    """Return a progress bar that is gone when it ends; rank 0 alone shows it.

    Args:
        total: Rows to come.
        show_from: Fewer rows than this take less time than a progress bar takes to be read.
    """
    return Progress(transient=True, disable=total < show_from or getattr(rank_zero_only, "rank", 0) != 0)
