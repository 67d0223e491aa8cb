"""Constructs of published templates: each chat gives the text that transformers gives, or both refuse it."""
# ruff: noqa: E501

import os

import pytest
from hypothesis import HealthCheck, given, settings

from tests.engine.token.text.drawn_templates import templates
from tests.engine.token.text.template_oracle import CHATS, Oracle, Ours, differences

EACH = "{% for m in messages %}"
CONSTRUCTS = {
    # what is undefined or null
    "an if without else": "{{- '<a>' if add_generation_prompt }}{{ 'T' if tools }}",
    "an attribute that is not there": EACH + "[{{ m.nothing }}|{{ m['nothing'] }}|{{ m.get('nothing') }}]{% endfor %}",
    "an attribute of what is undefined": "{{ nothing.more }}",
    "content that is null": EACH + "{{ m.content }};{{ m.content is none }};{{ 'content' in m }}{% endfor %}",
    "content that is null, joined": EACH + "{{ m.role + m.content }}{% endfor %}",
    "content that is null, as text": EACH + "{{ m.content | string }}{{ m.content ~ '!' }}{% endfor %}",
    "undefined in filters": "{{ x | length }}{{ x | list }}{{ x | join('-') }}{{ x | default('d') }}{{ x | trim }}",
    "undefined as number": "{{ x + 1 }}",
    "undefined compared": "{{ x == none }}{{ x is none }}{{ x is defined }}{{ not x }}{{ x in [1] }}{{ 1 in x }}",
    "undefined as JSON": "{{ x | tojson }}",
    "default of what is empty": "{{ '' | default('d') }}{{ '' | default('d', true) }}{{ none | d('e', boolean=true) }}",
    "documents and tools are null": "{{ documents is none }}{{ documents is defined }}{{ tools is none }}{{ tools }}",
    # newlines and blanks
    "a newline at the end, behind text": "{{ messages[0].content }}### Response:\n",
    "a newline at the end, behind an expression": "{{ messages[0].content }}\n",
    "several newlines at the end": "a{# c #}\n\n\n",
    "newlines behind blocks": EACH + "\n  {% if m %}\n  {{ m.role }}\n  {% endif %}\n{% endfor %}\n\nend\n",
    "signs at blocks": EACH + " \n {%- if m -%} \n {{- m.role -}} \n {%+ if true +%}\n x\n{% endif %}{%- endif %}{% endfor %}",
    "newlines of Windows": EACH + "\r\n{{ m.role }}\r\n{% endfor %}\r\n",
    "raw": "{% raw %}{{ x }}{% y %}{% endraw %}\n{{ '{{' }}",
    "comments": "{# a\n b #}\n  {#- c -#}  \nd{# {{ x }} #}",
    # kinds of things
    "what is iterable": "{% for x in [none, '', 'a', 1, 1.5, [], {}, true, nothing] %}{{ x is iterable }}{% endfor %}",
    "tools is iterable": "{% if tools is iterable and tools | length > 0 %}T{% endif %}",
    "what is a sequence": "{% for x in [none, 'a', 1, [], {}, nothing] %}{{ x is sequence }}{{ x is mapping }}{% endfor %}",
    "what is a number": "{% for x in [none, '1', 1, 1.0, true] %}{{ x is number }}{{ x is integer }}{{ x is float }}{% endfor %}",
    "other tests": "{{ 1 is odd }}{{ 4 is divisibleby 2 }}{{ 'a' is in 'abc' }}{{ 'A' is upper }}{{ 1 is sameas true }}{{ f is callable }}",
    "truth": "{% for x in ['', '0', 0, 0.0, [], [0], {}, none, nothing] %}{{ 'y' if x else 'n' }}{% endfor %}",
    "what content is": EACH + "{{ m.content is string }}{{ m.content is iterable and m.content is not string }}{% endfor %}",
    # numbers and text
    "floats": "{{ 1.0 }} {{ 0.1 + 0.2 }} {{ 1e20 }} {{ 1e-7 }} {{ 7 / 2 }} {{ 6 / 2 }} {{ 7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }}",
    "int and float": "{{ '3.7' | float | int }}{{ 'x' | int(5) }}{{ 2.5 | round }}{{ 3.14159 | round(2) }}{{ 1_000 }}",
    "large numbers": "{{ 2 ** 100 }}{{ 10 ** 20 | tojson }}",
    "truth as text": "{{ true }}{{ none }}{{ True }}{{ None }}{{ [true, none, 1.0, 'a', \"it's\"] }}{{ {'a': none} }}",
    "the percent sign": "{{ 'a%s %d %.2f' % ('b', 3, 1.5) }}{{ '%s' | format('x') }}",
    "methods of text": "{{ 'abc'.removeprefix('a') }}{{ 'a/b/c'.rsplit('/', 1)[0] }}{{ ' x '.strip() }}{{ 'ab'.title() }}"
    "{{ 'a,b'.split(',') }}{{ 'a\nb'.splitlines() }}{{ 'a=b'.partition('=') }}{{ '7'.zfill(3) }}{{ 'ab'.find('b') }}"
    "{{ 'xay'.replace('a', '-') }}{{ '-'.join(['a', 'b']) }}{{ 'ab'.startswith(('b', 'a')) }}{{ '{}-{x}'.format(1, x=2) }}"
    "{{ 'ab'.center(6, '*') }}{{ 'é'.encode('utf-8') }}{{ 'ab'.isalpha() }}{{ 'aXb'.swapcase() }}{{ 'aab'.count('a') }}",
    "methods of lists and dicts": "{{ [1, 2].index(2) }}{{ {'a': 1}.items() }}{{ {'a': 1}.keys() | list }}{{ {'a': 1}.get('b', 3) }}"
    "{{ [1].copy() }}{{ {'a': 1}.values() | list }}",
    "methods that would change a list": "{{ messages.append(1) }}",
    "methods that would change a dict": "{% if messages[0].update({'role': 'x'}) %}{% endif %}{{ messages[0].pop('role') }}",
    "slices": "{{ 'abcdef'[1:4] }}{{ 'abc'[::-1] }}{{ messages[-1].role }}{{ messages[::-1] | length }}{{ [1, 2, 3][:-1] }}{{ 'abc'[9] }}",
    "joining": "{{ 'a' ~ 1 ~ none ~ 1.5 ~ [1] }}{{ 'a' * 3 }}{{ [1] + [2] }}{{ 'a' + 1 }}",
    "comparisons": "{{ 1 < 2 < 3 }}{{ 'a' < 'b' }}{{ 'a' != 'b' }}{{ [1] == [1.0] }}{{ 1 == true }}{{ '1' == 1 }}",
    "escapes": "{{ 'a\\n\\t\\\\\\'\\x41\\u00e9' }}{{ \"\\\"\" }}",
    "HTML": "{{ '<&>' | e }}{{ '<b>' | safe }}{{ '<b>x' | striptags }}{{ '<' | escape | upper }}",
    # filters
    "JSON": "{{ {'b': [1.0, none, true], 'a': 'é<>&\\'\"\\n'} | tojson }}",
    "JSON with options": "{{ {'b': 1, 'a': ['é']} | tojson(indent=2, sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}"
    "{{ {'b': 1} | tojson(ensure_ascii=False, indent=4) }}",
    "JSON with an option that there is not": "{{ {} | tojson(nothing=1) }}",
    "tools as JSON": "{{ tools | tojson }}{% for t in tools or [] %}{{ t | tojson(indent=4) }}{{ t.function | string }}{% endfor %}",
    "arguments": EACH + "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{{ c.function.arguments }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }},{% endfor %}{{ c.function.arguments is string }}{% endfor %}{% endfor %}",
    "filters of lists": "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | rejectattr('tool_calls') | map(attribute='content') | list }}{{ [3, 1, 2] | sort }}{{ [1, 1, 2] | unique | list }}"
    "{{ [1, 2, 3] | sum }}{{ [1, 2] | max }}{{ [] | first }}{{ [1, 2, 3] | batch(2) | list }}{{ 'abc' | reverse }}{{ {'b': 1, 'a': 2} | dictsort }}"
    "{{ [1, 2, 3] | select('odd') | list }}{{ ['a'] | map('upper') | list }}{{ messages | groupby('role') | list | length }}{{ {'a': 1} | items | list }}",
    "filters of text": "{{ 'a b' | title }}{{ 'ab' | capitalize }}{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent(2, true) }}{{ 'abc' | truncate(2, true, '.') }}"
    "{{ 'a b c' | wordcount }}{{ 'x' | center(5) }}{{ 'a-b' | replace('-', '+', 1) }}{{ 'a b' | urlencode }}{{ 'abc def' | wordwrap(3) }}{{ 1234 | filesizeformat }}",
    "a filter that there is not": "{{ 'a' | nothing }}",
    "a filter that there is not, never reached": "{% if false %}{{ 'a' | nothing }}{% endif %}x",
    "a filter that there is not, for tools": "{% if tools %}{{ tools | from_json }}{% endif %}x",
    "a test that there is not": "{{ 'a' is nothing }}",
    # statements
    "loops": EACH + "{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }}"
    "{{ loop.previtem.role }}{{ loop.nextitem is defined }}{{ loop.changed(m.role) }}{{ loop.depth }}{% endfor %}",
    "loops with a condition and else": "{% for m in messages if m.role == 'none' %}x{% else %}nobody{% endfor %}",
    "loops over text, dicts and pairs": "{% for c in 'ab' %}{{ c }}.{% endfor %}{% for k in {'a': 1} %}{{ k }}{% endfor %}"
    "{% for a, (b, c) in [(1, (2, 3))] %}{{ a + b + c }}{% endfor %}{% for x in range(3, 0, -1) %}{{ x }}{% endfor %}",
    "loops over null": "{% for t in tools %}{{ t.function.name }}{% endfor %}",
    "break and continue": EACH + "{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "recursive loops": "{% for x in [[1], [2, [3]]] recursive %}{{ loop(x) if x is sequence else x }}{% endfor %}",
    "set in a loop": "{% set x = 1 %}" + EACH + "{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}",
    "set in a condition": "{% if true %}{% set x = 1 %}{% endif %}{{ x }}{% if false %}{% set y = 1 %}{% endif %}{{ y }}",
    "set of several, and of a block": "{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% set c %} {{ a }} {% endset %}[{{ c }}]{% set d | upper %}x{% endset %}{{ d }}",
    "namespaces": "{% set ns = namespace(a=1, found=false) %}" + EACH + "{% set ns.a = ns.a + 1 %}{% set ns.b = m.role %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.c }}",
    "namespaces of other things": "{% set x = {} %}{% set x.a = 1 %}",
    "namespaces with a name of Python": "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "macros": "{% macro f(a, b='x', c=none) %}{{ a }}{{ b }}{{ c }}{{ varargs }}{{ kwargs }}{{ caller is defined }}{% endmacro %}{{ f(1) }}{{ f(1, 2, 3, 4, d=5) }}{{ f.name }}",
    "macros before their definition": "{{ g(1) }}{% macro g(a) %}{{ a }}{% endmacro %}",
    "macros that call themselves": "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "macros without end": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(5) }}",
    "call": "{% macro f() %}<{{ caller('x') }}>{% endmacro %}{% call(a) f() %}{{ a }}!{% endcall %}",
    "filter, with, autoescape": "{% filter upper %}a{% endfilter %}{% with a = 1 %}{{ a }}{% endwith %}{{ a }}",
    "generation": EACH + "{% generation %}{% set z = m.role %}{{ z }}\n{% endgeneration %}\n{{ z }}{%- generation -%} a {%- endgeneration -%}{% endfor %}",
    "do": "{% do messages.append(1) %}",
    "include": "{% include 'other' %}",
    "blocks": "{% block a %}{{ messages[0].role }}{% endblock %}{{ self.a() }}",
    # what transformers adds, and what the server gives
    "refusals": EACH + "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' ~ m.role) }}{% endif %}{{ m.role }}{% endfor %}",
    "the date": "{{ strftime_now('%Y-%m-%d %H:%M %b %A') }}{{ strftime_now is defined }}{% set d = strftime_now('%d') %}{{ d }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ cls_token }}{{ mask_token is defined }}{{ bos_token + 'x' }}",
    "a special token that there is not": "{{ sep_token + 'x' }}",
    "dict and its kin": "{{ dict(a=1, b=none) }}{{ dict([('a', 1)]) | tojson }}{{ dict.fromkeys(['a'], 1) }}{% set j = joiner('|') %}{{ j() }}{{ j() }}"
    "{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}{{ range(3) | list }}",
    "reasoning under its names": EACH + "{{ m.reasoning_content }}{{ m.thinking }}{{ m.reasoning }}{{ 'thinking' in m }}{% endfor %}",
    "thoughts split off": EACH + "{% set c = m.content %}{% if c is string and '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ c }}{% endfor %}",
    "a variable of the request": "{{ enable_thinking }}{% if enable_thinking is defined and enable_thinking is false %}<off>{% endif %}",
    "messages as they are": "{{ messages }}{{ messages | tojson }}",
    "content in capitals": EACH + "{{ m.content | upper }}{% endfor %}",
    "content trimmed": EACH + "{{ m.content | trim }}|{% endfor %}",
    "content cut": EACH + "{{ m.content[:4] }}|{% endfor %}",
    "parts": EACH + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}{% endfor %}",
    "an unknown tag": "{% nothing %}",
    "a block without end": "{% for m in messages %}",
    "an end without a block": "{% endif %}",
    "import": "{% from 'x' import y %}{{ y }}",
}  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")  # Python's compiler knows no templates


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_construct_gives_what_transformers_gives(oracle, tmp_path, name):
    assert not differences(oracle, tmp_path, CONSTRUCTS[name])


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ 'a' | nothing }}", "No filter named 'nothing'"),
        ("{% for m in messages %}{{ m is nothing }}{% endfor %}", "No test named 'nothing'"),
        ("{% if true %}{{ 'a' | nothing }}{% endif %}", "No filter named 'nothing'"),
        ("{% nothing %}", "Encountered unknown tag 'nothing'"),
        ("{{ 'a", "unexpected char"),
        ("{% include 'other' %}", "no loader"),
        ("{% if messages %}{{ messages is nothing }}{% endif %}", "No test named 'nothing'"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(5) }}", "recursion"),
    ],
)
def test_a_template_that_cannot_work_is_refused_when_it_is_loaded(tmp_path, source, fault):
    said = Ours(tmp_path, source).refused
    assert said is not None and fault in said and said.endswith("; correct it") and "\n" not in said


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('send a picture') }}",
        "{{ language + messages[0].content }}",
        "{{ messages[0].content[30] + '' }}",
        "{% for tool in tools %}{{ tool }}{% endfor %}",
        "{{ messages[0].content[0].text + '' }}",
        "{{ messages[1].content + '' }}",
        "{% if documents %}{{ documents | nothing }}{% endif %}",
    ],
)
def test_a_template_that_wants_other_chats_is_loaded(tmp_path, source):
    assert Ours(tmp_path, source).refused is None


def compare_drawn(oracle: Oracle, folder, examples: int) -> None:
    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(templates(sorted(CHATS)))
    def compare(drawn: tuple[str, str]) -> None:
        source, name = drawn
        chat, options = CHATS[name]
        expected, said = oracle.says(source, chat, **options), Ours(folder, source).says(chat, **options)
        assert said == expected, (source, name)

    compare()


def test_drawn_templates_give_what_transformers_gives(oracle, tmp_path):
    compare_drawn(oracle, tmp_path, 300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_thousand_drawn_templates_give_what_transformers_gives(oracle, tmp_path):
    compare_drawn(oracle, tmp_path, int(os.environ.get("SOJOURN_DRAWN_TEMPLATES", "50000")))
