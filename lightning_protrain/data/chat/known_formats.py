"""Known chat formats, from the chat templates and model cards of their publishers."""

from __future__ import annotations

from lightning_protrain.data.chat.chat_format import EOS, Exclusion, Family, RoleBoundary

_THINK = Exclusion("thinking", "<think>", "</think>")
# Empty thoughts that templates write before answers. At inference with thinking disabled, they are in the prompt.
EMPTY_THOUGHTS = ("<think>\n\n</think>\n\n", "<think>\n\n</think>\n", "<think>\n</think>\n", "<think></think>")
_TURN_SCAFFOLDS = tuple(Exclusion("scaffold", text) for text in EMPTY_THOUGHTS)
_EVERYBODY = ("assistant", "user", "system", "developer", "tool")


def _alike(start: str, ends: tuple[str | None, ...], *roles: str, **names: str) -> tuple[RoleBoundary, ...]:
    """Return boundaries whose start markers differ in the name of the role only, which stands at `{}` in `start`.

    `ends` are the end markers of all roles; `names` has the names that differ from the role.
    """
    return tuple(RoleBoundary(role, (start.format(names.get(role, role)),), ends) for role in roles)


def _tool(start: str, ends: tuple[str | None, ...], *names: str) -> RoleBoundary:
    """Return the boundary of tools, which templates call by several names."""
    return RoleBoundary("tool", tuple(start.format(name) for name in names), ends)


_QWEN_MEDIA = (
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<|audio_bos|>", "<|audio_eos|>"),
    *("<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>"),
)
_CHATML_START, _CHATML_END = "<|im_start|>{}\n", ("<|im_end|>",)
_CHATML_ROLES = (
    *_alike(_CHATML_START, _CHATML_END, "assistant", "user", "system", "developer"),
    _tool(_CHATML_START, _CHATML_END, "tool", "function", "environment", "observation", "ipython"),
)
CHATML = Family("chatml", _CHATML_ROLES, (_THINK, *_TURN_SCAFFOLDS))
QWEN = Family("qwen", _CHATML_ROLES, (_THINK, *_TURN_SCAFFOLDS), _QWEN_MEDIA)
INTERNVL = Family(
    "internvl", _CHATML_ROLES, (_THINK, *_TURN_SCAFFOLDS), ("<img>", "</img>", "<IMG_CONTEXT>", "<image>", "<video>")
)

DEEPSEEK_V2 = Family(
    "deepseek-v2", (RoleBoundary("assistant", ("Assistant:",), (EOS,)), RoleBoundary("user", ("User:",)))
)


def _deepseek(name: str) -> str:
    return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")


_OUTPUT_BEGIN, _OUTPUT_END = _deepseek("tool output begin"), _deepseek("tool output end")
_OUTPUTS_BEGIN, _OUTPUTS_END = _deepseek("tool outputs begin"), _deepseek("tool outputs end")
# After tool results, the assistant's answer follows without a start marker, so the end of a result is one.
DEEPSEEK = Family(
    "deepseek",
    (
        RoleBoundary(
            "assistant",
            (
                _deepseek("Assistant"),
                _OUTPUT_END,
                _OUTPUTS_END,
                _OUTPUT_END + _OUTPUTS_END,
                _OUTPUT_END + "\n" + _OUTPUTS_END,
                _OUTPUT_END + _deepseek("Assistant"),
                _OUTPUTS_END + _deepseek("Assistant"),
                "</function_results>\n\n",
            ),
            (EOS,),
        ),
        RoleBoundary("user", (_deepseek("User"), _OUTPUT_END + _deepseek("User"), _OUTPUTS_END + _deepseek("User"))),
        RoleBoundary(
            "tool",
            (
                _OUTPUT_BEGIN,
                _OUTPUTS_BEGIN,
                _OUTPUTS_BEGIN + _OUTPUT_BEGIN,
                _OUTPUT_END + _OUTPUT_BEGIN,
                _OUTPUT_END + "\n" + _OUTPUT_BEGIN,
            ),
        ),
    ),
    (_THINK, *_TURN_SCAFFOLDS, Exclusion("scaffold", "</think>")),
)

# A turn has no end marker; it ends with the start marker of the next role, which also stops generation.
_GLM_NEXT = ("<|user|>", "<|observation|>", "<|system|>", "<|endoftext|>", None)
GLM4 = Family(
    "glm4",
    (
        RoleBoundary("assistant", ("<|assistant|>",), _GLM_NEXT),
        RoleBoundary("user", ("<|user|>\n", "<|user|>")),
        RoleBoundary("system", ("<|system|>\n", "<|system|>")),
        RoleBoundary("tool", ("<|observation|>\n", "<|observation|>")),
    ),
    (_THINK, *_TURN_SCAFFOLDS, Exclusion("scaffold", "\n<think></think>"), Exclusion("scaffold", "</think>")),
    (
        *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
        *("<|begin_of_video|>", "<|end_of_video|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
    ),
)

# The role is followed by the name of the speaker and <|im_middle|>.
KIMI = Family(
    "kimi",
    (
        RoleBoundary("assistant", ("<|im_assistant|>assistant<|im_middle|>", "<|im_assistant|>"), ("<|im_end|>",)),
        RoleBoundary("user", ("<|im_user|>",), ("<|im_end|>",)),
        RoleBoundary("system", ("<|im_system|>",), ("<|im_end|>",)),
    ),
    (
        _THINK,
        *_TURN_SCAFFOLDS,
        *(Exclusion("tool_output", f"<|im_{role}|>", "<|im_middle|>") for role in ("assistant", "user", "system")),
    ),
    ("<|media_start|>", "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
)

# Reasoning and tool calls are separate turns.
SOLAR = Family(
    "solar",
    (
        RoleBoundary("assistant", ("<|begin|>assistant",), ("<|end|>", "<|calls|>")),
        *(
            RoleBoundary(role, (f"<|begin|>{role}{kind}", f"<|begin|>{role}"), ("<|end|>",))
            for role, kind in (
                *((role, "<|content|>") for role in ("user", "system", "developer")),
                ("tool", "<|tool_response|>"),
            )
        ),
    ),
    (Exclusion("thinking", "<|think|>", "<|end|>"),),
)

PADDLEOCR = Family(
    "paddleocr-vl",
    (RoleBoundary("assistant", ("Assistant:\n", "Assistant:"), (EOS,)), RoleBoundary("user", ("User:",))),
    (),
    ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"),
)

GEMMA = Family(
    "gemma",
    _alike("<start_of_turn>{}\n", ("<end_of_turn>",), *_EVERYBODY, assistant="model"),
    (Exclusion("tool_output", "<start_function_response>", "<end_function_response>"),),
    (
        *("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        *("<start_of_audio>", "<audio_soft_token>", "<end_of_audio>"),
    ),
)
# Tool results are within the assistant's turn.
GEMMA4 = Family(
    "gemma4",
    _alike("<|turn>{}\n", ("<turn|>",), *_EVERYBODY, assistant="model"),
    (
        Exclusion("tool_output", "<|tool_response>", "<tool_response|>"),
        Exclusion("thinking", "<|channel>", "<channel|>"),
        Exclusion("scaffold", "<|channel>thought\n<channel|>"),
    ),
    ("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video>", "<|video|>", "<video|>"),
)

_LLAMA3_START, _LLAMA3_ENDS = "<|start_header_id|>{}<|end_header_id|>\n\n", ("<|eot_id|>", "<|eom_id|>")
LLAMA3 = Family(
    "llama3",
    (
        *_alike(_LLAMA3_START, _LLAMA3_ENDS, "assistant", "user", "system", "developer"),
        _tool(_LLAMA3_START, _LLAMA3_ENDS, "ipython", "tool", "environment"),
    ),
    (_THINK, *_TURN_SCAFFOLDS[:2]),
    ("<|image|>",),
)
_LLAMA4_START, _LLAMA4_ENDS = "<|header_start|>{}<|header_end|>\n\n", ("<|eot|>", "<|eom|>")
LLAMA4 = Family(
    "llama4",
    (
        *_alike(_LLAMA4_START, _LLAMA4_ENDS, "assistant", "user", "system", "developer"),
        _tool(_LLAMA4_START, _LLAMA4_ENDS, "ipython", "tool"),
    ),
    (),
    ("<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
)

_MISTRAL_MEDIA = ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[AUDIO]", "[BEGIN_AUDIO]")
_MISTRAL_ROLES = (
    # After tool results, the assistant's answer follows without a start marker, so the end of a result is one.
    RoleBoundary("assistant", ("[/INST]", "[/TOOL_RESULTS]"), (EOS,)),
    RoleBoundary("user", ("[INST]", "[/INST][INST]", "[/TOOL_RESULTS][INST]")),
    RoleBoundary("system", ("[SYSTEM_PROMPT]",), ("[/SYSTEM_PROMPT]",)),
    RoleBoundary("tools", ("[AVAILABLE_TOOLS]",), ("[/AVAILABLE_TOOLS]",)),
    RoleBoundary("tool", ("[TOOL_RESULTS]", "[/TOOL_RESULTS][TOOL_RESULTS]", "[/TOOL_RESULTS] [TOOL_RESULTS]")),
)
MISTRAL = Family("mistral", _MISTRAL_ROLES, (Exclusion("thinking", "[THINK]", "[/THINK]"),), _MISTRAL_MEDIA)
# For transcription, the template writes the language between the user's turn and the answer.
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
# Here "[INST]" is plain text rather than a control token, as in Llama 2.
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
    "phi4", _alike("<|im_start|>{}<|im_sep|>", ("<|im_end|>",), "assistant", "user", "system", "tool"), (_THINK,)
)

# The model generates the channel, so it is content. A tool's turn begins with the name of the tool.
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
# Names of roles are plain text; they are markers only at the beginning of a conversation and after a turn.
IDEFICS3 = Family(
    "idefics3",
    tuple(
        RoleBoundary(role.lower(), tuple(f"{before}{role}:" for before in _UTTERANCE), ("<end_of_utterance>",))
        for role in ("Assistant", "User", "System")
    ),
    (),
    (
        *("<image>", "<fake_token_around_image>", "<global-img>", "<video>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 9) for column in range(1, 9)),
    ),
)
LLAVA = Family(
    "llava",
    (RoleBoundary("assistant", ("ASSISTANT:",), (EOS, None)), RoleBoundary("user", ("USER:",), (EOS, None))),
    (),
    ("<image>", "<video>"),
)
ZEPHYR = Family("zephyr", _alike("<|{}|>\n", (EOS,), "assistant", "user", "system"))
_GRANITE_START, _GRANITE_END = "<|start_of_role|>{}<|end_of_role|>", ("<|end_of_text|>",)
GRANITE = Family(
    "granite",
    (
        *_alike(_GRANITE_START, _GRANITE_END, "assistant", "user", "system", "tool", tool="tool_response"),
        *_alike(_GRANITE_START, _GRANITE_END, "tools", tools="available_tools"),
        *_alike(_GRANITE_START, _GRANITE_END, "tools", "documents"),
    ),
    (_THINK,),
    ("<image>",),
)

_FAMILIES = (
    *(CHATML, QWEN, INTERNVL, DEEPSEEK_V2, DEEPSEEK, GLM4, KIMI, SOLAR, PADDLEOCR, GEMMA, GEMMA4, LLAMA3, LLAMA4),
    *(MISTRAL, VOXTRAL, MISTRAL_V1, PHI3, PHI4, GPT_OSS, IDEFICS3, LLAVA, ZEPHYR, GRANITE),
)
_BY_NAME = {family.name: family for family in _FAMILIES}

# Map from a model to the chat format that it uses.
ALIASES = {
    **dict.fromkeys(("qwen1.5", "qwen2", "qwen2.5", "qwen3", "qwen3.5", "qwen3.6", "qwq", "qvq"), "qwen"),
    **dict.fromkeys(("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen2-audio", "qwen2.5-omni", "qwen3-omni"), "qwen"),
    **dict.fromkeys(("qwen3-moe", "qwen3-vl-moe", "qwen3.5-moe"), "qwen"),
    **dict.fromkeys(("smollm2", "smollm3", "lfm2", "lfm2-vl", "lfm2vl", "hermes", "yi", "internlm2"), "chatml"),
    **dict.fromkeys(("internvl2", "internvl2.5", "internvl3", "internvl3.5"), "internvl"),
    **dict.fromkeys(
        ("gemma1", "gemma2", "gemma3", "gemma3n", "gemma-2", "gemma-3", "gemma-3n", "functiongemma"), "gemma"
    ),
    "gemma-4": "gemma4",
    **dict.fromkeys(("llama3.1", "llama3.2", "llama3.3", "llama-3", "llama-3.1", "llama-3.2", "llama-3.3"), "llama3"),
    **dict.fromkeys(("llama3.2-vision", "llama3-2-vision", "llama-3.2-vision", "mllama"), "llama3"),
    "llama-4": "llama4",
    **dict.fromkeys(("llama2", "llama-2", "llava-next", "llava-1.6", "mixtral-v1"), "mistral-v1"),
    **dict.fromkeys(("mistral-v2", "mistral-v3", "mistral-v3-tekken", "mistral-v7", "mistral-v7-tekken"), "mistral"),
    **dict.fromkeys(("mistral-v11", "mistral-v13", "mistral-nemo", "mistral-small", "mixtral"), "mistral"),
    **dict.fromkeys(
        ("tekken", "pixtral", "magistral", "ministral", "ministral-3", "mistral3", "ministral3", "devstral"), "mistral"
    ),
    **dict.fromkeys(("phi-3", "phi3.5", "phi-3.5", "phi-4-mini", "phi4-mini"), "phi3"),
    "phi-4": "phi4",
    **dict.fromkeys(("deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "deepseek-v4", "deepseek-r1"), "deepseek"),
    **dict.fromkeys(("gptoss", "harmony"), "gpt-oss"),
    **dict.fromkeys(
        ("glm-4", "glm4v", "glm-4v", "glm-4.5", "glm-4.5v", "glm-4.6", "glm4.5", "glm-4.7", "glm46v", "glm4-moe"),
        "glm4",
    ),
    **dict.fromkeys(("smolvlm", "smolvlm2", "idefics2"), "idefics3"),
    **dict.fromkeys(("vicuna", "llava-1.5", "llava1.5", "llava-next-vicuna"), "llava"),
    **dict.fromkeys(("kimi-k2", "kimi-vl", "kimi-k2-thinking", "moonlight"), "kimi"),
    **dict.fromkeys(("solar-open",), "solar"),
    **dict.fromkeys(("paddleocr", "ernie4.5", "ernie-4.5"), "paddleocr-vl"),
    **dict.fromkeys(("tulu", "olmo", "tinyllama"), "zephyr"),
}

FAMILIES: dict[str, Family] = _BY_NAME | {alias: _BY_NAME[name] for alias, name in ALIASES.items()}


def family_called(name: str) -> Family | None:
    """Return the chat format with a name or alias, ignoring case, `_`, `-` and `.`; None if it is unknown."""
    return _BY_KEY.get(_key(name))


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(".", "-")


_BY_KEY = {_key(name): family for name, family in FAMILIES.items()}
