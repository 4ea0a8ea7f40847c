"""What all ranks know at the end of a step, asked beside the step.

[Note: Facts]
In every optimizer step the ranks put together a few facts, one byte each, over a group of their own on the host: the
question is asked before the optimizer steps and answered after it, so that it runs beside the step, and no rank waits
for a device. All get the same answer at the same step. What becomes true after the question belongs to the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


class Agreement:
    """Asks for the highest value of each fact on any rank, see [Note: Facts].

    Args:
        facts: Those of this rank, numbers from 0 to 255; always as many.
    """

    def __init__(self, facts: Callable[[], Sequence[int]]) -> None:
        self._facts = facts
        self._group: dist.ProcessGroup | None = None
        self._question: tuple[dist.Work, torch.Tensor] | None = None

    def open(self) -> None:
        """From here on there are other ranks, if there are; every rank calls it."""
        if self._group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def ask(self) -> None:
        """Asks, unless that was done; every rank calls it, and `answer` after it."""
        if self._group is not None and self._question is None:
            facts = torch.tensor(self._facts(), dtype=torch.uint8)
            work = dist.all_reduce(facts, dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._question = work, facts

    def answer(self) -> list[int]:
        """To `ask`, or to a question of its own; the same on every rank.

        Raises:
            RuntimeError: Another rank has gone.
        """
        if self._group is None:
            return list(self._facts())
        self.ask()
        assert self._question is not None
        work, facts = self._question
        try:
            work.wait()
        except RuntimeError as gone:
            raise RuntimeError(
                f"The step cannot be ended on rank {dist.get_rank()}: another rank does not answer any more. Its own "
                "message, if it could leave one, is in the log of that rank."
            ) from gone
        self._question = None
        return [int(each) for each in facts]

    def close(self) -> None:
        """There are no other ranks any more."""
        group, self._group = self._group, None
        question, self._question = self._question, None
        # With a question under way it would wait for ranks that may have failed; the end of the process closes it too.
        if group is not None and question is None and dist.is_initialized():
            dist.destroy_process_group(group)
