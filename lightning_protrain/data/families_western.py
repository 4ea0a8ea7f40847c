"""Chat formats of Google, Meta, Microsoft, Mistral, OpenAI, Hugging Face and the LLaVA group, as data.

Source: the chat templates and model cards that these publish.
"""

from __future__ import annotations

from lightning_protrain.data.boundaries import EOS, Exclusion, Family, RoleBoundary

_THINK = Exclusion("thinking", "<think>", "</think>")
_SCAFFOLDS = tuple(Exclusion("scaffold", text) for text in ("<think>\n\n</think>\n\n", "<think>\n\n</think>\n"))

GEMMA = Family(
    "gemma",
    tuple(
        RoleBoundary(role, (f"<start_of_turn>{name}\n",), ("<end_of_turn>",))
        for role, name in (
            ("assistant", "model"),
            ("user", "user"),
            ("system", "system"),
            ("developer", "developer"),
            ("tool", "tool"),
        )
    ),
    (Exclusion("tool_output", "<start_function_response>", "<end_function_response>"),),
    (
        "<start_of_image>",
        "<image_soft_token>",
        "<end_of_image>",
        "<start_of_audio>",
        "<audio_soft_token>",
        "<end_of_audio>",
    ),
)
# The result of a tool stands inside the model's turn.
GEMMA4 = Family(
    "gemma4",
    tuple(
        RoleBoundary(role, (f"<|turn>{name}\n",), ("<turn|>",))
        for role, name in (
            ("assistant", "model"),
            ("user", "user"),
            ("system", "system"),
            ("developer", "developer"),
            ("tool", "tool"),
        )
    ),
    (
        Exclusion("tool_output", "<|tool_response>", "<tool_response|>"),
        Exclusion("thinking", "<|channel>", "<channel|>"),
        Exclusion("scaffold", "<|channel>thought\n<channel|>"),
    ),
    ("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video>", "<|video|>", "<video|>"),
)

LLAMA3 = Family(
    "llama3",
    (
        *(
            RoleBoundary(role, (f"<|start_header_id|>{role}<|end_header_id|>\n\n",), ("<|eot_id|>", "<|eom_id|>"))
            for role in ("assistant", "user", "system", "developer")
        ),
        RoleBoundary(
            "tool",
            tuple(f"<|start_header_id|>{name}<|end_header_id|>\n\n" for name in ("ipython", "tool", "environment")),
            ("<|eot_id|>", "<|eom_id|>"),
        ),
    ),
    (_THINK, *_SCAFFOLDS),
    ("<|image|>",),
)
LLAMA4 = Family(
    "llama4",
    (
        *(
            RoleBoundary(role, (f"<|header_start|>{role}<|header_end|>\n\n",), ("<|eot|>", "<|eom|>"))
            for role in ("assistant", "user", "system", "developer")
        ),
        RoleBoundary(
            "tool",
            tuple(f"<|header_start|>{name}<|header_end|>\n\n" for name in ("ipython", "tool")),
            ("<|eot|>", "<|eom|>"),
        ),
    ),
    (),
    ("<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
)

_MISTRAL_MEDIA = ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[AUDIO]", "[BEGIN_AUDIO]")
_MISTRAL_ROLES = (
    # What follows the result of a tool is an answer without a header of its own, unless it is the next result.
    RoleBoundary("assistant", ("[/INST]", "[/TOOL_RESULTS]"), (EOS,)),
    RoleBoundary("user", ("[INST]", "[/INST][INST]", "[/TOOL_RESULTS][INST]")),
    RoleBoundary("system", ("[SYSTEM_PROMPT]",), ("[/SYSTEM_PROMPT]",)),
    RoleBoundary("tools", ("[AVAILABLE_TOOLS]",), ("[/AVAILABLE_TOOLS]",)),
    RoleBoundary("tool", ("[TOOL_RESULTS]", "[/TOOL_RESULTS][TOOL_RESULTS]", "[/TOOL_RESULTS] [TOOL_RESULTS]")),
)
MISTRAL = Family("mistral", _MISTRAL_ROLES, (Exclusion("thinking", "[THINK]", "[/THINK]"),), _MISTRAL_MEDIA)
# In a transcription the language stands between the user's turn and the text.
VOXTRAL = Family(
    "voxtral",
    (
        RoleBoundary("assistant", ("[/INST]", "[/TOOL_RESULTS]", "[TRANSCRIBE]"), (EOS,)),
        RoleBoundary("user", ("[INST]", "[/INST][INST]", "[/TOOL_RESULTS][INST]", "[/INST]lang:")),
        *_MISTRAL_ROLES[2:],
    ),
    (),
    _MISTRAL_MEDIA,
)
# The brackets are plain text here, as in Llama 2.
MISTRAL_V1 = Family(
    "mistral-v1",
    (
        RoleBoundary("assistant", ("[/INST]",), (EOS,)),
        RoleBoundary("user", ("[INST]", "[/INST][INST]", "[/INST] [INST]")),
    ),
    (),
    ("<image>",),
)

PHI3 = Family(
    "phi3",
    (
        *(
            RoleBoundary(role, (f"<|{role}|>\n", f"<|{role}|>"), ("<|end|>",))
            for role in ("assistant", "user", "system")
        ),
        RoleBoundary("tool", ("<|tool|>", "<|tool_response|>"), ("<|/tool|>", "<|end|>")),
    ),
    (_THINK,),
    ("<|image|>", "<|endoftext10|>", "<|endoftext11|>"),
)
PHI4 = Family(
    "phi4",
    tuple(
        RoleBoundary(role, (f"<|im_start|>{role}<|im_sep|>",), ("<|im_end|>",))
        for role in ("assistant", "user", "system", "tool")
    ),
    (_THINK,),
)

# The channel is written by the model, so it is content. A tool's turn begins with its name.
GPT_OSS = Family(
    "gpt-oss",
    (
        RoleBoundary("assistant", ("<|start|>assistant",), ("<|end|>", "<|return|>", "<|call|>")),
        *(
            RoleBoundary(role, (f"<|start|>{role}<|message|>", f"<|start|>{role}"), ("<|end|>",))
            for role in ("user", "system", "developer")
        ),
        RoleBoundary("tool", ("<|start|>",), ("<|end|>",)),
    ),
    (
        Exclusion("thinking", "<|channel|>analysis<|message|>", "<|end|>"),
        *(Exclusion("tool_output", f"<|start|>{name}", "<|message|>") for name in ("functions", "browser", "python")),
    ),
)

_UTTERANCE = ("<end_of_utterance>\n", "<|im_start|>", "<|begin_of_text|>", "<s>")
# Names of roles are plain text, which only counts at the begin of the row and after the end of a turn.
IDEFICS3 = Family(
    "idefics3",
    tuple(
        RoleBoundary(role.lower(), tuple(f"{before}{role}:" for before in _UTTERANCE), ("<end_of_utterance>",))
        for role in ("Assistant", "User", "System")
    ),
    (),
    (
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        "<video>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 9) for column in range(1, 9)),
    ),
)
LLAVA = Family(
    "llava",
    (RoleBoundary("assistant", ("ASSISTANT:",), (EOS, None)), RoleBoundary("user", ("USER:",), (EOS, None))),
    (),
    ("<image>", "<video>"),
)
ZEPHYR = Family(
    "zephyr",
    tuple(RoleBoundary(role, (f"<|{role}|>\n",), (EOS,)) for role in ("assistant", "user", "system")),
)
GRANITE = Family(
    "granite",
    tuple(
        RoleBoundary(name, (f"<|start_of_role|>{role}<|end_of_role|>",), ("<|end_of_text|>",))
        for name, role in (
            ("assistant", "assistant"),
            ("user", "user"),
            ("system", "system"),
            ("tool", "tool_response"),
            ("tools", "available_tools"),
            ("tools", "tools"),
            ("documents", "documents"),
        )
    ),
    (_THINK,),
    ("<image>",),
)

FAMILIES = (
    GEMMA,
    GEMMA4,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    VOXTRAL,
    MISTRAL_V1,
    PHI3,
    PHI4,
    GPT_OSS,
    IDEFICS3,
    LLAVA,
    ZEPHYR,
    GRANITE,
)
