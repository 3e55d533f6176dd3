"""Chat templates that show calls in the forms of well-known models.

They are written for these tests and show nothing but what a form of answers is told from and what
calls look like in it. An assistant message stands between ``<|im_start|>assistant`` and a line end,
and ``<|im_end|>``.
"""

from __future__ import annotations

from collections.abc import Mapping

_FRAME = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}THINKING{% endif %}
    {{- message.content }}
    {%- if message.tool_calls %}CALLS{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}OPENING{% endif %}"""

_EACH = "{%- for call in message.tool_calls %}{%- set f = call.function %}"
_THINK = (
    "{%- if message.reasoning_content %}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
)

_GEMMA_VALUE = """\
{%- macro show(value) -%}
    {%- if value is string -%}QUOTE{{ value }}QUOTE
    {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is none -%}null
    {%- elif value is mapping -%}
        {{ '{' }}{%- for k, v in value.items() -%}
            {{ k }}:{{ show(v) }}{{ ',' if not loop.last }}
        {%- endfor -%}{{ '}' }}
    {%- elif value is sequence -%}
        [{%- for v in value -%}{{ show(v) }}{{ ',' if not loop.last }}{%- endfor -%}]
    {%- else -%}{{ value }}
    {%- endif -%}
{%- endmacro -%}"""


def _template(calls: str, *, thinking: str = "", opening: str = "", before: str = "") -> str:
    frame = _FRAME.replace("CALLS", calls).replace("THINKING", thinking)
    return before + frame.replace("OPENING", opening)


def _gemma(opening: str, closing: str, quote: str) -> str:
    calls = (
        f"{_EACH}{{{{- '{opening}call:' + f.name }}}}{{{{- show(f.arguments) + '{closing}' }}}}"
        "{%- endfor %}"
    )
    return _template(calls, before=_GEMMA_VALUE.replace("QUOTE", quote))


HERMES = _template(
    _EACH + "{{- '\\n<tool_call>\\n' + {'name': f.name, 'arguments': f.arguments} | tojson }}"
    "{{- '\\n</tool_call>' }}{%- endfor %}",
    thinking=_THINK,
)
OPENED = HERMES.replace(
    "{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}"
)
"""Reasoning begins in the prompt."""

TEMPLATES: Mapping[str, str] = {
    "hermes": HERMES,
    "nemotron": _template(
        "{{- '<TOOLCALL>[' }}"
        + _EACH
        + "{{- {'name': f.name, 'arguments': f.arguments} | tojson }}"
        "{{- ', ' if not loop.last }}{%- endfor %}{{- ']</TOOLCALL>' }}"
    ),
    "qwen-coder": _template(
        _EACH + "{{- '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}"
        "{%- for k, v in f.arguments.items() %}{{- '<parameter=' + k + '>\\n' }}"
        "{{- v if v is string else v | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}"
        "{{- '</function>\\n</tool_call>' }}{%- endfor %}"
    ),
    "json": _template(
        _EACH + "{{- {'name': f.name, 'parameters': f.arguments} | tojson }}"
        "{{- '; ' if not loop.last }}{%- endfor %}"
    ),
    "mistral": _template(
        "{{- '[TOOL_CALLS][' }}"
        + _EACH
        + "{%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
        "{{- {'name': f.name, 'arguments': f.arguments, 'id': call.id} | tojson }}"
        "{{- ', ' if not loop.last }}{%- endfor %}{{- ']' }}"
    ),
    "mistral-args": _template(
        _EACH + "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}{%- endfor %}"
    ),
    "glm": _template(
        _EACH + "{{- '\\n<tool_call>' + f.name }}{%- for k, v in f.arguments.items() %}"
        "{{- '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
        "{{- v if v is string else v | tojson }}{{- '</arg_value>' }}{%- endfor %}"
        "{{- '\\n</tool_call>' }}{%- endfor %}"
    ),
    "kimi": _template(
        "{{- '<|tool_calls_section_begin|>' }}"
        + _EACH
        + "{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}"
        "{{- f.arguments | tojson + '<|tool_call_end|>' }}{%- endfor %}"
        "{{- '<|tool_calls_section_end|>' }}"
    ),
    "deepseek": _template(
        "{{- '<｜tool▁calls▁begin｜>' }}"
        + _EACH
        + "{{- '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' }}"
        "{{- f.arguments | tojson + '<｜tool▁call▁end｜>' }}{%- endfor %}"
        "{{- '<｜tool▁calls▁end｜>' }}"
    ),
    "deepseek-fence": _template(
        "{{- '<｜tool▁calls▁begin｜>' }}"
        + _EACH
        + "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' }}"
        "{{- f.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}"
        "{{- '<｜tool▁calls▁end｜>' }}"
    ),
    "dsml": _template(
        "{{- '\\n\\n<｜DSML｜function_calls>\\n' }}"
        + _EACH
        + "{{- '<｜DSML｜invoke name=\"' + f.name + '\">\\n' }}"
        "{%- for k, v in f.arguments.items() %}"
        "{{- '<｜DSML｜parameter name=\"' + k + '\" string=\"' }}"
        "{{- ('true' if v is string else 'false') + '\">' }}"
        "{{- v if v is string else v | tojson }}{{- '</｜DSML｜parameter>\\n' }}{%- endfor %}"
        "{{- '</｜DSML｜invoke>\\n' }}{%- endfor %}{{- '</｜DSML｜function_calls>' }}"
    ),
    "gemma": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function-gemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "harmony": _template(
        _EACH + "{{- '<|channel|>commentary to=functions.' + f.name }}"
        "{{- ' <|constrain|>json<|message|>' + f.arguments | tojson + '<|call|>' }}{%- endfor %}",
        thinking="{%- if message.thinking %}"
        "{{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}"
        "{% endif %}{%- if message.content %}"
        "{{- '<|channel|>' + ('commentary' if message.tool_calls else 'final') + '<|message|>' }}"
        "{% endif %}",
    ),
}
