import pytest

from lightning_protrain.data.chat.chat_format import EOS, Exclusion, Family, RoleBoundary, parse_boundaries


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"role": " ", "start": ("a",)}, "empty role"),
        ({"role": "user", "start": ()}, "'user' has no start marker"),
        ({"role": "user", "start": ("",)}, "'user' has an empty start marker"),
        ({"role": "user", "start": ("a",), "end": ()}, "'user' has no end marker"),
        ({"role": "user", "start": ("a",), "end": (" ",)}, "'user' has an empty end marker"),
        ({"role": "user", "start": ("a", "a")}, "a start marker twice"),
        ({"role": "user", "start": ("a",), "end": (None, None)}, "a end marker twice"),
    ],
)
def test_a_boundary_that_makes_no_sense_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoleBoundary(**arguments)


def test_an_exclusion_has_a_known_kind_and_a_start() -> None:
    with pytest.raises(ValueError, match=r"kind 'thoughts'\. Use one of tool_output, thinking, scaffold"):
        Exclusion("thoughts", "<think>")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty start"):
        Exclusion("thinking", "")


def test_a_start_marker_belongs_to_one_role() -> None:
    with pytest.raises(ValueError, match="'<a>' belongs to both 'user' and 'tool'"):
        Family("f", (RoleBoundary("user", ("<a>",)), RoleBoundary("tool", ("<b>", "<a>"))))


def test_roles_are_named_once_in_order() -> None:
    family = Family("f", (RoleBoundary("b", ("1",)), RoleBoundary("a", ("2",)), RoleBoundary("b", ("3",))))
    assert family.roles == ("b", "a")


def test_boundaries_of_a_user_are_read() -> None:
    family = parse_boundaries(
        [
            {"role": "user", "start": "[INST]"},
            {"role": "assistant", "start": ["[/INST]", "[/R]"], "end": [EOS, None], "include_start": True},
            {"role": "tool", "start": "[R]", "end": None, "include_end": False},
        ]
    )
    assert family.boundaries == (
        RoleBoundary("user", ("[INST]",), (None,)),
        RoleBoundary("assistant", ("[/INST]", "[/R]"), (EOS, None), include_start=True),
        RoleBoundary("tool", ("[R]",), (None,), include_end=False),
    )


def test_an_empty_list_is_an_answer() -> None:
    assert parse_boundaries([]) == Family("role_boundaries", ())


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"role": "user"}, "role_boundaries is a dict"),
        ("user", "role_boundaries is a str"),
        (["user"], r"role_boundaries\[0\] is 'user'"),
        ([{"role": "user", "start": "a", "ends": "b"}], r"\[0\]: unknown key 'ends'. Did you mean 'end'"),
        ([{"role": "user", "start": "a", "x": "b"}], r"unknown key 'x'. The keys are `role`, `start`"),
        ([{"role": "user"}], "the key 'start' is missing"),
        ([{"start": "a"}], "the key 'role' is missing"),
        ([{"role": 1, "start": "a"}], "role=1 is no text"),
        ([{"role": "user", "start": None}], "start=null"),
        ([{"role": "user", "start": [1]}], r"start=\[1\] holds a int"),
        ([{"role": "user", "start": "eos_token"}], "stands for a token only in `end`"),
        ([{"role": "user", "start": []}], r"\[0\]: The role 'user' has no start marker"),
        ([{"role": "user", "start": "a", "end": 3}], "end=3 holds a int"),
        ([{"role": "user", "start": "a", "include_end": "yes"}], "include_end='yes' is neither true nor false"),
        ([{"role": "user", "start": "a"}, {"role": "tool", "start": "a"}], "belongs to both"),
    ],
)
def test_what_a_user_gets_wrong_is_named(specs: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_boundaries(specs)  # type: ignore[arg-type]
