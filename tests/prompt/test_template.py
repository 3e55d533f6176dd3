from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from anaphora.clock import ManualClock
from anaphora.errors import TemplateError
from anaphora.prompt.template import ChatTemplate, read_template

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<é & 'b'>"}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(MESSAGES, **variables)


REPEAT = "{% set ns = namespace(x=10, s='a') %}{% for i in range(99) %}"
HUGE = "{% set big = range(100000) | list %}"
NESTED = (
    "{% set ns = namespace(x=1, y=1) %}{% for i in range(100) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)

HOSTILE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "endless recursion": "{% macro m(n) %}{{ m(n - 1) }}{% endmacro %}{{ m(1) }}",
    "doubling recursion": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "recursive loop": "{% for x in range(3) recursive %}{{ loop(range(100000)) }}{% endfor %}",
    "recursive block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "long string": "{{ 'a' * 10**10 }}",
    "long list": "{{ ([1] * 10**9) | length }}",
    "large power": "{{ 10 ** 10 ** 3 }}{{ 10 ** (10 ** 10) }}",
    "large product": REPEAT + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent filter": "{{ '%1000000000d' | format(1) }}",
    "percent nested": NESTED + "{{ '%s' % ns.x }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format argument width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format map width": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format nested": NESTED + "{{ '{}'.format(ns.x) }}",
    "center": "{{ 'a'.center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join": "{{ ('a' * 100000).join('b' * 100000) }}",
    "join filter": "{{ range(100000) | join('a' * 100000) }}",
    "indent": "{{ 'a\nb' | indent(1000000000) }}",
    "indent text": "{{ ('a\n' * 100000) | indent('b' * 9000) }}",
    "json indent": "{{ [1, [2]] | tojson(indent=1000000000) }}",
    "json nested": NESTED + "{{ ns.x | tojson }}",
    "round": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "sum of lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
    "doubling text": REPEAT + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling sum": REPEAT + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "print nested": NESTED + "{{ ns.x }}",
    "concatenate nested": NESTED + "{{ ns.x ~ '' }}",
    "compare nested": NESTED + "{{ ns.x == ns.y }}",
    "test nested": NESTED + "{{ ns.x is eq(ns.y) }}",
    "print a cycle": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "much text": "{% for i in range(100000) %}" + "x" * 10_000 + "{% endfor %}",
    "much text unseen": (
        "{% macro m() %}{% for i in range(100000) %}" + "x" * 10_000 + "{% endfor %}{% endmacro %}"
        "{{ m() | length }}"
    ),
    "slices": HUGE + "{% for i in range(100000) %}{% set x = big[:] %}{% endfor %}",
    "filtered often": HUGE
    + "{% for i in big %}{% set x = big | select('odd') | list %}{% endfor %}",
    "private attribute": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__.os.getcwd() }}",
    "attribute filter": "{{ (messages | attr('__class__')).x }}",
    "format attribute": "{{ '{0.__class__.__mro__}'.format(1) ~ raise_exception.__globals__ }}",
    "mutation": "{{ messages.append(1) }}",
    "item mutation": "{{ messages[0].update({'role': 'x'}) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "random": "{{ [1, 2] | random }}",
    "lipsum": "{{ lipsum(100000) }}",
    "syntax": "{% for %}",
    "unclosed": "{% if x %}",
    "deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% for x in [1] %}" * 50 + "{% endfor %}" * 50,
    "long source": "x" * (2 << 20),
    "division by zero": "{{ 1 / 0 }}",
    "unknown function": "{{ foo() }}",
    "type error": "{{ messages + 1 }}",
    "loop over nothing": "{% for x in None %}{% endfor %}",
    "long error": "{{ raise_exception('a\nb' * 100000) }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_template_becomes_one_line_quickly(source: str) -> None:
    started = time.perf_counter()
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert time.perf_counter() - started < 10
    message = str(caught.value)
    assert message.strip()
    assert "\n" not in message
    assert len(message) < 700


def test_budget_is_counted_not_timed() -> None:
    def loops(count: int) -> str:
        return f"{{% for a in range({count}) %}}{{% endfor %}}" * 10

    assert render(loops(45_000)) == ""
    for _ in range(3):
        with pytest.raises(TemplateError, match="too much work"):
            render(loops(50_000))


def test_budget_grows_with_the_conversation() -> None:
    messages = [{"role": "user", "content": "word " * 2000} for _ in range(1000)]
    source = (
        "{% for m in messages %}{{ m.role ~ m.content | trim }}"
        "{% if m == messages[-1] %}!{% endif %}{{ messages | length }}{% endfor %}"
    )
    text = ChatTemplate(source).render(messages)
    assert len(text) > 9_000_000


def test_template_refuses_with_its_own_words() -> None:
    with pytest.raises(TemplateError) as caught:
        render("{{ raise_exception('Roles must\n alternate') }}")
    assert str(caught.value) == "Roles must alternate"


def test_blocks_leave_no_white_space() -> None:
    assert render("  {% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"


def test_json_is_written_as_models_know_it() -> None:
    assert render("{{ messages[1] | tojson }}") == (
        """{"role": "assistant", "content": "<é & 'b'>"}"""
    )
    assert render("{{ {'b': [1], 'a': none} | tojson(indent=2) }}") == (
        '{\n  "b": [\n    1\n  ],\n  "a": null\n}'
    )
    assert render("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}") == (
        '{"a":2,"b":1}'
    )


def test_loops_know_their_place_and_can_be_left() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{{ (loop.nextitem or '?').role }} {% endfor %}"
        "{% for x in range(9) %}{% if x == 1 %}{% continue %}{% endif %}"
        "{% if x == 3 %}{% break %}{% endif %}"
        "{{ x }}{% endfor %}{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}"
    )
    assert render(source) == "1/2Falseassistant 2/2True 02role=user;content=Hi;"


def test_generation_block_is_transparent() -> None:
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


def test_special_tokens_options_and_absent_tools() -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ thinking }}{{ absent }}"
    assert render(source, options={"thinking": 3}) == "<s></s>True3"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"


def test_generation_prompt_is_asked_for() -> None:
    source = "{% if add_generation_prompt %}go{% endif %}"
    assert render(source) == "go"
    assert render(source, add_generation_prompt=False) == ""


def test_date_comes_from_the_clock() -> None:
    clock = ManualClock()
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", clock=clock)
    first = template.render(MESSAGES)
    clock.advance(24 * 3600)
    assert first.startswith("2027-01-1")
    assert template.render(MESSAGES) != first


def test_ordinary_string_methods_work() -> None:
    source = (
        "{{ 'a-b'.split('-') | join('+') }}{{ ' x '.strip() }}{{ '{}!'.format('f') }}"
        "{{ '%s%%' % 'p' }}{{ 'ab'.replace('a', 'c').upper() }}{{ 'abc'[::-1] }}{{ 2 ** 10 }}"
    )
    assert render(source) == "a+bxf!p%CBcba1024"


def test_parts_are_wanted_only_where_strings_are_not_shown() -> None:
    assert not ChatTemplate("{{ messages[0].content }}").wants_parts
    assert not ChatTemplate("{{ raise_exception('never') }}").wants_parts
    assert ChatTemplate("{% for p in messages[0].content %}{{ p.text }}{% endfor %}").wants_parts


def test_override_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }} é", encoding="utf-8")
    assert render(read_template(path)) == "Hi é"
    path.write_bytes(b"\xff\xfe")
    for bad in (path, tmp_path / "missing.jinja", tmp_path):
        with pytest.raises(TemplateError, match="cannot read the chat template"):
            read_template(bad)
