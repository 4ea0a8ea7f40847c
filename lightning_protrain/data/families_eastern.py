"""ChatML, and the chat formats of Alibaba, Baidu, DeepSeek, Moonshot, Shanghai AI Lab and Zhipu, as data.

Source: the chat templates and model cards that these publish.
"""

from __future__ import annotations

from lightning_protrain.data.boundaries import EOS, Exclusion, Family, RoleBoundary

_THINK = Exclusion("thinking", "<think>", "</think>")
# An empty thought that the template writes; where thinking is off it belongs to the prompt.
_SCAFFOLDS = tuple(
    Exclusion("scaffold", text)
    for text in ("<think>\n\n</think>\n\n", "<think>\n\n</think>\n", "<think>\n</think>\n", "<think></think>")
)
_QWEN_MEDIA = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|AUDIO|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
)
_CHATML_ROLES = (
    *(
        RoleBoundary(role, (f"<|im_start|>{role}\n",), ("<|im_end|>",))
        for role in ("assistant", "user", "system", "developer")
    ),
    RoleBoundary(
        "tool",
        tuple(f"<|im_start|>{name}\n" for name in ("tool", "function", "environment", "observation", "ipython")),
        ("<|im_end|>",),
    ),
)
CHATML = Family("chatml", _CHATML_ROLES, (_THINK, *_SCAFFOLDS))
QWEN = Family("qwen", _CHATML_ROLES, (_THINK, *_SCAFFOLDS), _QWEN_MEDIA)
INTERNVL = Family(
    "internvl", _CHATML_ROLES, (_THINK, *_SCAFFOLDS), ("<img>", "</img>", "<IMG_CONTEXT>", "<image>", "<video>")
)

DEEPSEEK_V2 = Family(
    "deepseek-v2", (RoleBoundary("assistant", ("Assistant:",), (EOS,)), RoleBoundary("user", ("User:",)))
)


def _deepseek(name: str) -> str:
    return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")


_OUTPUT_BEGIN, _OUTPUT_END = _deepseek("tool output begin"), _deepseek("tool output end")
_OUTPUTS_BEGIN, _OUTPUTS_END = _deepseek("tool outputs begin"), _deepseek("tool outputs end")
# What follows the results of tools is an answer without a header of its own, unless it is the next result.
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
    (_THINK, *_SCAFFOLDS, Exclusion("scaffold", "</think>")),
)

# No end of its own: the token of the next role ends a turn, and is what the model stops at.
_GLM_NEXT = ("<|user|>", "<|observation|>", "<|system|>", "<|endoftext|>", None)
GLM4 = Family(
    "glm4",
    (
        RoleBoundary("assistant", ("<|assistant|>",), _GLM_NEXT),
        RoleBoundary("user", ("<|user|>\n", "<|user|>")),
        RoleBoundary("system", ("<|system|>\n", "<|system|>")),
        RoleBoundary("tool", ("<|observation|>\n", "<|observation|>")),
    ),
    (
        _THINK,
        *_SCAFFOLDS,
        Exclusion("scaffold", "\n<think></think>"),
        Exclusion("scaffold", "</think>"),
    ),
    (
        "<|image|>",
        "<|video|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|begin_of_audio|>",
        "<|end_of_audio|>",
    ),
)

# The name of the speaker is free text up to <|im_middle|>.
KIMI = Family(
    "kimi",
    (
        RoleBoundary("assistant", ("<|im_assistant|>assistant<|im_middle|>", "<|im_assistant|>"), ("<|im_end|>",)),
        RoleBoundary("user", ("<|im_user|>",), ("<|im_end|>",)),
        RoleBoundary("system", ("<|im_system|>",), ("<|im_end|>",)),
    ),
    (
        _THINK,
        *_SCAFFOLDS,
        *(Exclusion("tool_output", f"<|im_{role}|>", "<|im_middle|>") for role in ("assistant", "user", "system")),
    ),
    (
        "<|media_start|>",
        "<|media_begin|>",
        "<|media_content|>",
        "<|media_pad|>",
        "<|media_end|>",
    ),
)

# Thoughts and calls are turns of their own.
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

FAMILIES = (CHATML, QWEN, INTERNVL, DEEPSEEK_V2, DEEPSEEK, GLM4, KIMI, SOLAR, PADDLEOCR)
