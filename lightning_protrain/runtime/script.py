"""The order in which ranks of a node gather chunks in one training step, as each of them goes through it. No tensors.

[Note: Script]
A *script* is what a rank did in the training step before: the chunks that it fetched, one after the other, and in
between *marks*: where backward began, and where the gradients of a chunk were sent. All ranks of a node have said in
the beginning of the step that theirs is the same, and each of them gathers every chunk in it once, in its order:

- A rank whose next fetch is the next one of the script gathers that chunk.
- One that needs something else *leaves* the script: it fetches alone for the rest of the step. Of what is left in the
  script it still takes part in every gather, for the sake of the others and without a use for it: at once in all those
  up to the next sums, and in those behind them as soon as it has sent the same sums. What is left in the end comes
  when its backward has ended.

So a rank gathers nothing later than the script has it among the sums, which are the same on all ranks in the same
order, whatever they compute. That is why nobody waits for ever: of all that ranks wait for, take what comes first in
the script. A rank that has not begun it yet waits for something in turn, and that comes earlier in the script, or has
been begun by all: a rank in the script has begun all that comes before, and one that has left waits for sums alone,
with everything begun that the script has before them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

# Marks among the indices of chunks.
SUMS, BACKWARD = -1, -2


def digest(script: Sequence[int]) -> int:
    """A number of 62 bits that differs where scripts do; not 0."""
    packed = struct.pack(f"<{len(script)}q", *script)
    return 1 + int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") % ((1 << 62) - 1)


class Walk:
    """The way of one rank through a script, see [Note: Script].

    Args:
        script: Indices of chunks, and marks.

    Attributes:
        left: Whether this rank does something else by now.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self.left = False
        self._script = tuple(script)
        self._at = 0

    def reach(self, event: int) -> bool:
        """Whether what this rank does next is what the script has next; if it has left, `owed` follows.

        Args:
            event: The chunk that it needs, or a mark.
        """
        if not self.left and self._script[self._at : self._at + 1] == (event,):
            self._at += 1
        else:
            self.left = True
        return not self.left

    def send(self) -> None:
        """The sums whose mark was reached before have been sent; if this rank has left, `owed` follows."""
        if self.left and self._script[self._at : self._at + 1] == (SUMS,):
            self._at += 1

    def owed(self) -> list[int]:
        """The chunks up to the next sums that this rank gathers for others, in order; none as long as it stays."""
        end = self._at
        while self.left and end < len(self._script) and self._script[end] != SUMS:
            end += 1
        found = [index for index in self._script[self._at : end] if index != BACKWARD]
        self._at = end
        return found

    def end(self) -> list[int]:
        """The same for all that is left when the step has ended."""
        self.left = self.left or self._at < len(self._script)
        found = [index for index in self._script[self._at :] if index >= 0]
        self._at = len(self._script)
        return found
