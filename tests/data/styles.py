"""Families as ids: what the formats of the field do differently."""

from __future__ import annotations

from lightning_protrain.data.chat.markers import ExclusionMarkers
from tests.data.turns import NEWLINE, NEWLINES, TAILS, Form, Style, family, mark, role

OPEN, CLOSE = 3, 4
SYSTEM, USER, ASSISTANT, TOOL = 20, 21, 22, 23
THINKING = ExclusionMarkers("thinking", (mark(OPEN),), (mark(CLOSE),))
EMPTY_THINKING = ExclusionMarkers("scaffold", (mark(OPEN, NEWLINES, CLOSE, tails=TAILS),), ())


def _chatml() -> Style:
    names = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
    roles = [role(name, [mark(1, token, tails=TAILS)], [mark(2)]) for name, token in names.items()]
    forms = {
        name: Form(((1, token),), ((2,),), (NEWLINE,), tailed=True)
        for name, token in names.items()
        if name != "assistant"
    }
    forms["assistant"] = Form(
        ((1, ASSISTANT),),
        ((2,),),
        (NEWLINE,),
        tailed=True,
        parts={"thinking": ((OPEN,), (CLOSE,))},
        first=((OPEN, NEWLINES, CLOSE, NEWLINES), (OPEN, NEWLINES, CLOSE, NEWLINE)),
    )
    tempting = ((ASSISTANT,), (1,), (1, ASSISTANT), (1, USER), (1, NEWLINE), (NEWLINES,))
    return Style(family("chatml", roles, EMPTY_THINKING, THINKING), forms, tempting=tempting, begin=())


def _llama3() -> Style:
    names = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "ipython": TOOL, "tool": 24}
    ends = [mark(5), mark(6)]
    roles = [role(name, [mark(1, token, 2, tails=TAILS)], ends) for name, token in names.items()]
    forms = {name: Form(((1, token, 2),), ((5,), (6,)), tailed=True) for name, token in names.items()}
    return Style(
        family("llama3", roles), forms, tempting=((1,), (1, ASSISTANT), (1, ASSISTANT, 2), (2,), (ASSISTANT, 2))
    )


def _mistral() -> Style:
    # The end of the user's turn is the start of the assistant's, and so is that of a tool's result.
    roles = [
        role("user", [mark(3)], [mark(4)], include_end=False),
        role("assistant", [mark(4), mark(8)], [mark(2)]),
        role("tool", [mark(7)], [mark(8)], include_end=False),
        role("system", [mark(17)], [mark(18)]),
    ]
    forms = {
        "user": Form(((3,),)),
        "assistant": Form(((4,), (8,)), ((2,),)),
        "tool": Form(((7,),)),
        "system": Form(((17,),), ((18,),)),
    }
    follow = {"": ("user", "system"), "user": ("assistant",), "tool": ("assistant",), "system": ("user",)}
    follow["assistant"] = ("user", "tool")
    after = {"user": (4,), "tool": (8,)}
    return Style(family("mistral", roles), forms, {"user": 1, "tool": 1}, may_follow=follow, start_after=after)


def _deepseek() -> Style:
    # The scaffold is one token, and the answer after a tool's result has another start.
    roles = [
        role("user", [mark(5)]),
        role("assistant", [mark(6), mark(9)], [mark(2)]),
        role("tool", [mark(8)]),
    ]
    forms = {
        "user": Form(((5,),)),
        "assistant": Form(((6,), (9,)), ((2,),), first=((CLOSE,),)),
        "tool": Form(((8,),)),
    }
    return Style(family("deepseek", roles, ExclusionMarkers("scaffold", (mark(CLOSE),), ())), forms)


def _glm() -> Style:
    # Nothing ends a turn but the start of another.
    ends = [mark(36), mark(38), mark(35)]
    roles = [
        role("system", [mark(35)]),
        role("user", [mark(36)]),
        role("assistant", [mark(37)], ends),
        role("observation", [mark(38)]),
    ]
    forms = {entry.role: Form((entry.starts[0].ids,)) for entry in roles}
    follow = {"assistant": ("system", "user", "observation")}
    return Style(family("glm", roles), forms, {"assistant": 1}, may_follow=follow, begin=(98, 99))


def _harmony() -> Style:
    ends = [mark(7), mark(2), mark(13)]
    thinking = ExclusionMarkers("thinking", (mark(5, 35, 8),), (mark(7),))
    names = {"system": (6, 51, 8), "developer": (6, 52, 8), "user": (6, 53, 8), "tool": (6, 54), "assistant": (6, 50)}
    roles = [role(name, [mark(*start)], ends) for name, start in names.items()]
    forms = {name: Form((start,), ((7,), (2,), (13,))) for name, start in names.items()}
    forms["assistant"] = Form(((6, 50),), ((7,), (2,), (13,)), whole=(("thinking", (5, 35, 8)),))
    tempting = ((6,), (50,), (6, 51), (51, 8), (5, 35), (5, 36, 8))
    return Style(family("harmony", roles, thinking), forms, tempting=tempting, begin=())


def _gemma4() -> Style:
    names = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
    roles = [role(name, [mark(5, token, tails=TAILS)], [mark(6)]) for name, token in names.items()]
    output = ExclusionMarkers("tool_output", (mark(50),), (mark(51),))
    thinking = ExclusionMarkers("thinking", (mark(7, 30, tails=TAILS),), (mark(8),))
    parts = {"tool_output": ((50,), (51,)), "thinking": ((7, 30, NEWLINE), (8,))}
    forms = {name: Form(((5, token),), ((6,),), (NEWLINE,), tailed=True) for name, token in names.items()}
    forms["assistant"] = Form(((5, ASSISTANT),), ((6,),), (NEWLINE,), tailed=True, parts=parts)
    tempting = ((5,), (5, ASSISTANT), (7,), (7, 30), (30,))
    return Style(family("gemma4", roles, output, thinking), forms, tempting=tempting)


def _idefics() -> Style:
    # The role's name is text; the end of a turn is a part of the next start.
    user, assistant = (40, 41), (42, 41)
    roles = [
        role("user", [mark(9, NEWLINE, *user), mark(99, *user)], [mark(9)]),
        role("assistant", [mark(9, NEWLINE, *assistant)], [mark(9)]),
    ]
    forms = {"user": Form(((9, NEWLINE, *user),)), "assistant": Form(((9, NEWLINE, *assistant),))}
    tempting = (user, assistant, (42,), (NEWLINE, *user), (41,))
    return Style(family("idefics", roles), forms, {"user": 1, "assistant": 1}, tempting)


def _headings() -> Style:
    # Text of several tokens, one of them twice, and one start that is the begin of another.
    human, reply, hint = (60, 60, 61), (60, 60, 62), (60, 60, 62, 63)
    end = mark(64, 65)
    roles = [role("user", [mark(*human)]), role("assistant", [mark(*reply), mark(*hint)], [end, mark(66)])]
    forms = {"user": Form((human,)), "assistant": Form((reply, hint), ((64, 65), (66,)), (NEWLINE,))}
    return Style(family("headings", roles), forms, tempting=((60,), (60, 60), (61,), (64,), (62, 63), (60, 61)))


STYLES = {
    style.markers.family: style
    for style in (
        _chatml(), _llama3(), _mistral(), _deepseek(), _glm(), _harmony(), _gemma4(), _idefics(), _headings(),
    )
}  # fmt: skip
