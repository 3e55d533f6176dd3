"""Small vocabularies and chat templates in the manner of well-known model families.

The templates are written for these tests. Each keeps one habit of its family that makes prompts
hard: trimming, header tokens, tokens built from the role, dropped reasoning, refusals.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from llama_cpp import llama_cpp

from anaphora.engine.llamacpp import logs
from anaphora.engine.llamacpp.vocabulary import LlamaVocabulary
from tests.tiny_models import byte_alphabet

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools: ' + tools | tojson(indent=2) }}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function | tojson }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(turns=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.turns = ns.turns + 1 %}
        {%- if loop.last and tools %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif loop.first %}
        {{- '[INST] ' + message.content + ' [/INST]' + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported') }}
    {%- endif %}
{%- endfor %}"""

GEMMA = """\
{{ bos_token }}
{%- set opening = '' -%}
{%- if messages[0].role == 'system' -%}
    {%- set opening = messages[0].content + '\\n\\n' -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{ raise_exception('System role not supported here') }}
    {%- endif -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{ '<start_of_turn>' + role + '\\n' + (opening if loop.first else '') }}
    {{- message.content | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}"""

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.last < 0 and message.role == 'user' and not (
            message.content.startswith('<tool_response>')
            and message.content.endswith('</tool_response>')) %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

PHI3 = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""


@dataclass(frozen=True)
class Spec:
    """What a family's vocabulary is made of. The first control token is BOS, the second EOS."""

    template: str
    control: tuple[str, ...]
    user_defined: tuple[str, ...] = ()
    sentencepiece: bool = False
    add_bos: bool = True


FAMILIES = {
    "chatml": Spec(CHATML, ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), add_bos=False),
    "llama3": Spec(
        LLAMA3,
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "mistral": Spec(
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        sentencepiece=True,
    ),
    "gemma": Spec(
        GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), sentencepiece=True
    ),
    "qwen3": Spec(
        QWEN3,
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        user_defined=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        add_bos=False,
    ),
    # llama.cpp lets the control tokens of a model of this name swallow white space after them.
    "phi-3": Spec(
        PHI3,
        (
            *("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"),
            "<|endoftext|>",
        ),
        sentencepiece=True,
    ),
}


class Loaded:
    """A vocabulary and llama.cpp's own view of it."""

    def __init__(self, path: Path, template: str | None = None) -> None:
        logs.route()
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        assert self._model
        if template is None:
            template = llama_cpp.llama_model_chat_template(self._model, None).decode()
        self.template: str = template
        self.vocabulary = LlamaVocabulary(self._model)
        self.control_ids = frozenset(self.vocabulary.control.values())

    def parse(self, text: str) -> list[int]:
        """llama.cpp's tokens of ``text``, with control tokens parsed and no BOS added."""
        data = text.encode()
        buffer = (llama_cpp.llama_token * (2 * len(data) + 8))()
        vocab: Any = llama_cpp.llama_model_get_vocab(self._model)
        count = llama_cpp.llama_tokenize(
            vocab, data, ctypes.c_int(len(data)), buffer, len(buffer), False, True
        )
        return list(buffer[:count])

    def control_in(self, tokens: Iterable[int]) -> list[int]:
        return [int(token) for token in tokens if int(token) in self.control_ids]

    def show(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens`` without their control tokens."""
        return b"".join(self.vocabulary.piece(int(token)) for token in tokens).decode(
            errors="replace"
        )

    def close(self) -> None:
        llama_cpp.llama_model_free(self._model)


def write_vocabulary(path: Path, name: str, spec: Spec) -> Path:
    """A GGUF file with a vocabulary and nothing else."""
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    tokens: list[tuple[str, TokenType, float]] = []
    if spec.sentencepiece:
        words = ("▁the", "▁t", "th", "he", "in", "ing", "▁th", "s>", "▁a", "an", "and", "▁and")
        tokens = [(text, TokenType.CONTROL, 0.0) for text in spec.control]
        tokens += [("<unk>", TokenType.UNKNOWN, 0.0)]
        tokens += [(f"<0x{byte:02X}>", TokenType.BYTE, 0.0) for byte in range(256)]
        tokens += [(word, TokenType.NORMAL, -1.0 - n) for n, word in enumerate(words)]
        letters = ["▁", *map(chr, range(33, 127))]
        tokens += [(letter, TokenType.NORMAL, -100.0 - n) for n, letter in enumerate(letters)]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([score for _, _, score in tokens])
        writer.add_unk_token_id(len(spec.control))
    else:
        merges = ("Ġ t", "h e", "Ġt he", "i n", "in g", "Ċ Ċ", "Ġ a", "1 2", "12 3")
        tokens = [(text, TokenType.CONTROL, 0.0) for text in spec.control]
        tokens += [(letter, TokenType.NORMAL, 0.0) for letter in byte_alphabet()]
        tokens += [(merge.replace(" ", ""), TokenType.NORMAL, 0.0) for merge in merges]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe" if name == "llama3" else "qwen2")
        writer.add_token_merges(list(merges))
    if spec.user_defined:
        tokens += [(text, TokenType.USER_DEFINED, 0.0) for text in spec.user_defined]
    writer.add_token_list([text for text, _, _ in tokens])
    writer.add_token_types([kind for _, kind, _ in tokens])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(spec.add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
