"""The search for messages and for faults in them; `test_documentation.py` runs it on the package."""

from __future__ import annotations

import ast

import pytest

from tests.support.messages import Finder, Message, faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Give {name} or {path!r}.", None),
        ("num_blocks={num}: this model has {plural(len(blocks), 'block')}.", None),
        ("{kept} of {total} blocks are kept ({format_bytes(size)}).", None),
        ("`data` is empty.", None),
        ("there is no plan.", "neither a capital"),
        ("There is no plan", "full stop"),
        ("There is  no plan.", "spaces"),
        ("No caf\u00e9.", "ASCII"),
        ("This model has {len(blocks)} blocks.", "`plural`"),
        ("This model has {len(blocks)} frozen blocks.", "`plural`"),
        ("The plan needs {size} GiB.", "`format_bytes`"),
        ("The ranks have come apart.", "diverged"),
        ("The weights are torn.", "partially stepped"),
        ("Write {{'messages': [...]}} in {path}.", None),
        ("World size is {{self.world_size}}.", "no f-string"),
        ("Give {{name!r}}.", "no f-string"),
    ],
)
def test_a_planted_fault_is_found(text: str, fault: str | None) -> None:
    found = faults(Message("planner/search.py", text))
    assert (len(found) == 1 and fault in found[0]) if fault else not found


def test_messages_are_found_wherever_their_text_stands() -> None:
    source = """
AGAIN = "Make it again."

def refuse(name):
    return ValueError(f"{name!r} is no name. {AGAIN}")

def reason(late):
    return "It is late." if late else f"It is {hour():02d} hours."

class Plan:
    def check(self, path, two):
        if two:
            raise refuse(path)
        why = f"No plan at {path}." + (" Or two." if two else "")
        rank_zero_warn(why)
        self.say(reason(self.late))
        if self.late:
            raise ValueError("{path} is " + "late.")
        raise KeyError(path)
"""
    assert [each.text for each in sorted(Finder({"plan.py": ast.parse(source)}).messages())] == [
        "It is late.",
        "It is {hour()} hours.",
        "No plan at {path}.[ Or two.|]",
        "{name} is no name. Make it again.",
        "{{path}} is late.",
    ]
