"""What holds for every message of the package; `messages.txt` is the list of them."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.messages import Finder, Message, package_messages

# Where parts of sentences stand, which other messages quote: they have no full stop.
CLAUSES = (
    "checkpoint/manifest.py",
    "checkpoint/references.py",
    "checkpoint/verification.py",
    "data/batches/encode.py",
    "data/batches/tokenizer.py",
    "data/chat/check_turns.py",
    "data/chat/detect_format.py",
    "data/chat/render.py",
    "data/chat/verify_format.py",
    "data/sources/tables.py",
    "planner/fsdp_memory.py",
    "profiler/fake_mode.py",
    "runtime/grad_offload.py",
)
# What begins a sentence: a capital, a placeholder, code in backticks, or a name that is no English word.
BEGINS = re.compile(r"[A-Z{`\[]|[a-z]\w*[=_.]|lightning-protrain ")
# Messages for which one of the rules does not make sense, and why.
OTHERS = {
    "module {__name__} has no attribute": "Python's own words",
    "one of the variables needed for gradient computation": "PyTorch's own words, which users search for",
    "The memory that ranks have shared cannot": "`strerror` of an OSError: the command line adds the full stop",
    "Chat data needs transformers": "ends with a command",
    "{name or type(module).__name__} holds {found} weights": "a kind of weights, not a number",
    "{name}: {report.num_doubtful} conversations": "says `1 conversations`",
    "{where}: the processor refuses {len(images)}": "says `1 images`",
    "{problem.ranks.name} needs": "`all 32 blocks` or `12 of 32 blocks`",
}
ENDS = re.compile(r"[.?}\])]$")
# A number before one of these goes through `plural`, which knows "1 chunk".
COUNTED = "batch|block|buffer|byte|chunk|conversation|embedding|image|layer|message|module|node|parameter|rank|row|"
COUNTED += "second|shard|step|tensor|token|turn|unit|weight"
PLURAL = re.compile(rf"(?<!\}} of )\{{[^{{}}]*\}} (?:(?!of|has|have|are|is|such)[a-z]+ )?(?:{COUNTED})e?s\b")
BYTES = re.compile(r"\} ?(?:[KMGT]i?)?B\b|\} bytes\b")
# Words of earlier versions, and what is said now.
PRIVATE = {
    r"torn": "partially stepped, or cut short",
    r"come apart": "diverged",
    r"on paper": "dry run",
    r"outlook": "prediction",
    r"shortage": "does not fit",
    r"crew": "threads",
    r"twins?": "device parameter",
    r"land(s|ed|ing)?": "copied to the host",
    r"gaug(e|es|ed|ing)": "bandwidth probe",
    r"gone on from": "resumed",
    r"machines? of the cluster": "nodes",
    r"of ours|ours": "this package",
}


def faults(message: Message) -> list[str]:
    """Return what is wrong with a message."""
    text, found = message.text, []
    if text.startswith(tuple(OTHERS)):
        return []
    clause = message.path in CLAUSES and not text.endswith(".")
    if not clause and not BEGINS.match(text):
        found.append("begins with neither a capital nor a name")
    if not clause and not ENDS.search(text):
        found.append("has no full stop")
    if "  " in text or text != text.strip():
        found.append("has spaces too many")
    if not text.isascii():
        found.append("is not ASCII")
    if PLURAL.search(text):
        found.append("may say 1 of several: use `plural`")
    if BYTES.search(text):
        found.append("has bytes without `format_bytes`")
    words = re.sub(r"\{[^{}]*\}|`[^`]*`", "", text)
    found += [f"says {word!r} for {instead!r}" for word, instead in PRIVATE.items() if re.search(rf"\b{word}\b", words)]
    return found


def test_every_message_holds_the_rules() -> None:
    found = [f"{each.path}: {each.text}\n    {fault}" for each in package_messages() for fault in faults(each)]
    assert not found, "\n".join(found)


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
        raise KeyError(path)
"""
    assert [each.text for each in sorted(Finder({"plan.py": ast.parse(source)}).messages())] == [
        "It is late.",
        "It is {hour()} hours.",
        "No plan at {path}.[ Or two.|]",
        "{name} is no name. Make it again.",
    ]
