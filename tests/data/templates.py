"""Small chat templates that write what the formats of the families write, and the control tokens they need."""
# ruff: noqa: E501

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A chat format: its family, template, control tokens and end-of-sequence token."""

    family: str
    template: str
    controls: tuple[str, ...]
    eos: str


def _deepseek(text: str) -> str:
    for name in ("begin of sentence", "end of sentence", "User", "Assistant", "tool outputs begin", "tool outputs end"):
        text = text.replace(f"<{name}>", f"<\uff5c{name}\uff5c>".replace(" ", "\u2581"))
    for name in ("tool output begin", "tool output end", "tool calls begin", "tool calls end"):
        text = text.replace(f"<{name}>", f"<\uff5c{name}\uff5c>".replace(" ", "\u2581"))
    return text


_CALLS = (
    "{%- for call in m.tool_calls or [] %}CALL{{ call.function.name }} {{ call.function.arguments }}END{%- endfor %}"
)


def _calls(before: str, after: str) -> str:
    return _CALLS.replace("CALL", before).replace("END", after)


_LOOP = "{%- for m in messages %}"
CHATML = (
    _LOOP
    + "<|im_start|>{{ m.role + '\n' }}{%- if m.content %}{{ m.content }}{%- endif %}"
    + _calls("<tool_call>", "</tool_call>")
    + "<|im_end|>{{ '\n' }}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>{{ 'assistant\n' }}{%- endif %}"
)
# Tool results are a user's, an empty thought is put before the last answer, thoughts of former turns are dropped.
QWEN3 = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}"
    + _LOOP
    + "{%- if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}{{ m.content or '' }}"
    + _calls("<tool_call>", "</tool_call>")
    + "{{ '<|im_end|>\n' }}{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{%- for m in messages %}{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{%- endif %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}"
    "{%- endif %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"
)
# Calls, results and the answer stand in one turn of the model.
GEMMA4 = (
    "{{ '<bos>' }}{%- set ns = namespace(open=false) %}"
    + _LOOP
    + "{%- if m.role == 'tool' %}<|tool_response>response:{{ m.content }}<tool_response|>{%- else %}"
    "{%- if not (ns.open and m.role == 'assistant') %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{%- endif %}{{ (m.content or '') | trim }}{%- set ns.open = false %}"
    + _calls("<|tool_call>", "<tool_call|>")
    + "{%- if m.tool_calls %}{%- set ns.open = true %}{%- else %}{{ '<turn|>\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|turn>model\n' }}{%- endif %}"
)


def _llama(left: str, right: str, end: str, call_end: str) -> str:
    return (
        "{{ '<|begin_of_text|>' }}"
        + _LOOP
        + f"{{%- set role = 'ipython' if m.role == 'tool' else m.role %}}{{{{ '{left}' + role + '{right}\n\n' }}}}"
        f"{{{{ m.content or '' }}}}{_calls('<|python_tag|>', '')}"
        f"{{%- if m.tool_calls %}}{call_end}{{%- else %}}{end}{{%- endif %}}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{{{{ '{left}assistant{right}\n\n' }}}}{{%- endif %}}"
    )


LLAMA3 = _llama("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
LLAMA4 = _llama("<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>")


def _mistral(space: str) -> str:
    return (
        "{{ '<s>' }}" + _LOOP + "{%- if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
        f"{{%- elif m.role == 'user' %}}[INST]{{{{ '{space}' + m.content }}}}[/INST]"
        "{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        f"{{%- else %}}{{%- if m.content %}}{{{{ '{space}' + m.content }}}}{{%- endif %}}"
        + _calls("[TOOL_CALLS]", "")
        + "{{ '</s>' }}{%- endif %}{%- endfor %}"
    )


MISTRAL = _mistral("")
MISTRAL_V3 = _mistral(" ")
MISTRAL_V1 = (
    "{{ '<s>' }}"
    + _LOOP
    + "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{%- else %}{{ ' ' + m.content + '</s>' }}"
    "{%- endif %}{%- endfor %}"
)
PHI3 = (
    _LOOP
    + "{{ '<|' + m.role + '|>\n' + (m.content or '') }}"
    + _calls("<|tool_call|>", "<|/tool_call|>")
    + "{{ '<|end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- else %}{{ '<|endoftext|>' }}"
    "{%- endif %}"
)
PHI4 = (
    _LOOP
    + "{{ '<|im_start|>' + m.role + '<|im_sep|>' + (m.content or '') }}"
    + _calls("", "")
    + "{{ '<|im_end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{%- endif %}"
)
DEEPSEEK_V2 = (
    "{{ '<bos>' }}"
    + _LOOP
    + "{%- if m.role == 'user' %}{{ 'User: ' + m.content + '\n\n' }}{%- elif m.role == 'assistant' %}"
    "{{ 'Assistant: ' + m.content + '<eos>' }}{%- elif m.role == 'system' %}{{ m.content + '\n\n' }}{%- else %}"
    "{{ raise_exception('no such role') }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ 'Assistant:' }}{%- endif %}"
)
# Results of tools come together; the answer to them has no header.
DEEPSEEK_V3 = _deepseek(
    "{{ '<begin of sentence>' }}{%- set ns = namespace(tool=false) %}"
    + _LOOP
    + "{%- if m.role == 'user' %}{{ '<User>' + m.content }}"
    "{%- elif m.role == 'system' %}{{ m.content }}{%- elif m.role == 'tool' %}"
    "{{ '\n' if ns.tool else '<tool outputs begin>' }}<tool output begin>{{ m.content }}<tool output end>"
    "{%- else %}{%- if ns.tool %}{{ '<tool outputs end>' }}{%- else %}{{ '<Assistant>' }}{%- endif %}"
    "{{ m.content or '' }}"
    + _calls("<tool calls begin>", "<tool calls end>")
    + "{{ '<end of sentence>' }}{%- endif %}{%- set ns.tool = m.role == 'tool' %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<Assistant>' }}{%- endif %}"
)
DEEPSEEK_V31 = _deepseek(
    "{{ '<begin of sentence>' }}{%- set ns = namespace(tool=false) %}"
    + _LOOP
    + "{%- if m.role == 'user' %}{{ '<User>' + m.content }}"
    "{%- elif m.role == 'system' %}{{ m.content }}{%- elif m.role == 'tool' %}"
    "<tool output begin>{{ m.content }}<tool output end>"
    "{%- else %}{%- if not ns.tool %}{{ '<Assistant></think>' }}{%- endif %}{{ m.content or '' }}"
    + _calls("<tool calls begin>", "<tool calls end>")
    + "{{ '<end of sentence>' }}{%- endif %}{%- set ns.tool = m.role == 'tool' %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<Assistant></think>' }}{%- endif %}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>You are a model.<|end|>' }}"
    + _LOOP
    + "{%- if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content }}"
    "<|end|>{%- elif m.role == 'assistant' %}{%- if m.reasoning_content and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{%- endif %}"
    "{%- if m.tool_calls %}{%- for call in m.tool_calls %}<|start|>assistant to=functions.{{ call.function.name }}"
    "<|channel|>commentary json<|message|>{{ call.function.arguments }}<|call|>{%- endfor %}{%- else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{%- endif %}"
    "{%- else %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}<|message|>{{ m.content }}<|end|>{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"
)
GLM = (
    "[gMASK]<sop>"
    + _LOOP
    + "{%- if m.role == 'tool' %}{{ '<|observation|>\n<tool_response>' + m.content + '</tool_response>' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|assistant|>\n<think>' + (m.reasoning_content or '') + '</think>' }}"
    "{%- if m.content %}{{ '\n' + m.content }}{%- endif %}"
    + _calls("<tool_call>", "</tool_call>")
    + "{%- else %}{{ '<|' + m.role + '|>\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)
# Contents are lists of parts.
IDEFICS3 = (
    "{{ '<|im_start|>' }}{%- for m in messages %}{{ m.role | capitalize }}{{ ':' if m.content[0].type == 'image' else ': ' }}"
    "{%- for part in m.content %}{%- if part.type == 'text' %}{{ part.text }}{%- else %}{{ '<' + part.type + '>' }}{%- endif %}"
    "{%- endfor %}{{ '<end_of_utterance>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ 'Assistant:' }}{%- endif %}"
)
LLAVA = (
    "{{ 'A chat.' }}" + _LOOP + "{%- if m.role == 'user' %}{{ ' USER: ' + m.content }}{%- elif m.role == 'assistant' %}"
    "{{ ' ASSISTANT: ' + m.content + '</s>' }}{%- else %}{{ raise_exception('no such role') }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ ' ASSISTANT:' }}{%- endif %}"
)
KIMI = (
    _LOOP
    + "{%- set name = m.name or m.role %}{%- if m.role == 'user' %}<|im_user|>{%- elif m.role == 'assistant' %}<|im_assistant|>"
    "{%- else %}<|im_system|>{%- endif %}{{ name }}<|im_middle|>{{ m.content or '' }}"
    + _calls("<|tool_call_begin|>", "<|tool_call_end|>")
    + "<|im_end|>{%- endfor %}{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{%- endif %}"
)
# Thoughts and calls are turns of their own.
SOLAR = (
    _LOOP
    + "{%- if m.role == 'tool' %}<|begin|>tool<|tool_response|>{{ m.content }}<|end|>{%- elif m.role == 'assistant' %}"
    "{%- if m.reasoning_content and loop.last %}<|begin|>assistant<|think|>{{ m.reasoning_content }}<|end|>{%- endif %}"
    "{%- if m.tool_calls %}<|begin|>assistant<|tool_calls|>"
    + _calls("<|tool_call:begin|>", "<|tool_call:end|>")
    + "<|calls|>{%- else %}<|begin|>assistant<|content|>{{ m.content }}<|end|>{%- endif %}"
    "{%- else %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|begin|>assistant{%- endif %}"
)
PADDLEOCR = (
    "{{ '<|begin_of_sentence|>' }}"
    + _LOOP
    + "{%- if m.role == 'user' %}{{ 'User: ' + m.content + '\n' }}{%- elif m.role == 'assistant' %}"
    "{{ 'Assistant:\n' + m.content + '</s>' }}{%- else %}{{ m.content + '\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'Assistant:\n' }}{%- endif %}"
)
ZEPHYR = (
    _LOOP
    + "{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{%- endfor %}"
    + "{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}"
)
GRANITE = (
    _LOOP
    + "{{ '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_of_role|>' + (m.content or '') }}"
    + _calls("<|tool_call|>", "")
    + "{{ '<|end_of_text|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)

_IM = ("<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_INST = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_PROMPT = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
_DEEPSEEK = tuple(
    _deepseek(
        "<begin of sentence> <end of sentence> <User> <Assistant> <tool outputs begin> <tool outputs end> <tool output begin> "
        "<tool output end> <tool calls begin> <tool calls end>".replace("> <", ">~<")
    ).split("~")
)
_LLAMA3 = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
    "<|image|>",
)  # fmt: skip
_LLAMA4 = (
    "<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>", "<|python_tag|>", "<|image|>",
)  # fmt: skip
_GLM = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|endoftext|>", "<|image|>")
_KIMI = (
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>",
)  # fmt: skip
FORMATS = {
    "chatml": Format("chatml", CHATML, _IM, "<|im_end|>"),
    "qwen3": Format("qwen", QWEN3, (*_IM, *_TAGS, "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"), "<|im_end|>"),
    "internvl": Format("internvl", CHATML, (*_IM, "<img>", "</img>", "<IMG_CONTEXT>"), "<|im_end|>"),
    "gemma3": Format(
        "gemma", GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<image_soft_token>"), "<eos>"
    ),
    "gemma4": Format(
        "gemma4",
        GEMMA4,
        (
            "<bos>",
            "<eos>",
            "<|turn>",
            "<turn|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            "<|channel>",
            "<channel|>",
            "<|image|>",
        ),
        "<eos>",
    ),
    "llama3": Format("llama3", LLAMA3, _LLAMA3, "<|eot_id|>"),
    "llama4": Format("llama4", LLAMA4, _LLAMA4, "<|eot|>"),
    "mistral-v3": Format("mistral", MISTRAL_V3, _INST, "</s>"),
    "mistral-v7-tekken": Format("mistral", MISTRAL, (*_INST, *_PROMPT), "</s>"),
    "mistral-v1": Format("mistral-v1", MISTRAL_V1, ("<s>", "</s>"), "</s>"),
    "phi3": Format(
        "phi3", PHI3, ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"), "<|endoftext|>"
    ),
    "phi4": Format("phi4", PHI4, (*_IM, "<|im_sep|>"), "<|im_end|>"),
    "deepseek-v2": Format("deepseek-v2", DEEPSEEK_V2, ("<bos>", "<eos>"), "<eos>"),
    "deepseek-v3": Format("deepseek", DEEPSEEK_V3, (*_DEEPSEEK, "<think>", "</think>"), _DEEPSEEK[1]),
    "deepseek-v3.1": Format("deepseek", DEEPSEEK_V31, (*_DEEPSEEK, "<think>", "</think>"), _DEEPSEEK[1]),
    "deepseek-distill": Format("deepseek", DEEPSEEK_V3, _DEEPSEEK[:4], _DEEPSEEK[1]),
    "gpt-oss": Format(
        "gpt-oss",
        HARMONY,
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        "<|return|>",
    ),
    "glm4.5": Format("glm4", GLM, (*_GLM, *_TAGS), "<|endoftext|>"),
    "idefics3": Format("idefics3", IDEFICS3, ("<|im_start|>", "<end_of_utterance>", "<image>"), "<end_of_utterance>"),
    "llava": Format("llava", LLAVA, ("<s>", "</s>", "<image>"), "</s>"),
    "kimi": Format("kimi", KIMI, _KIMI, "<|im_end|>"),
    "solar": Format(
        "solar",
        SOLAR,
        (
            *("<|begin|>", "<|content|>", "<|think|>", "<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:end|>"),
            *("<|tool_response|>", "<|calls|>", "<|end|>"),
        ),
        "<|end|>",
    ),
    "paddleocr": Format("paddleocr-vl", PADDLEOCR, ("<|begin_of_sentence|>", "</s>"), "</s>"),
    "zephyr": Format("zephyr", ZEPHYR, ("</s>",), "</s>"),
    "granite": Format(
        "granite",
        GRANITE,
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
        "<|end_of_text|>",
    ),
}
