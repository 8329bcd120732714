#!/usr/bin/env python3
"""Writes tests/data/jinja_golden.json and tokenizer_golden.json: what transformers and tokenizers answer. [--check]"""
import json
import pathlib
import random
import sys

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from conversations import FIXED, TOOLS
from corpus import random_bytes, random_text

ROOT = pathlib.Path(__file__).resolve().parents[3]

VARIABLES = {
    "n": 7, "z": 0, "neg": -3, "f": 2.5, "t": True, "no": None, "s": "Hello World", "u": "Grüße, 世界 🙂 ŉ ǆ ß", "e": "",
    "ws": " \t\n x y \u00a0\n", "csv": "a,b,,c", "lst": [3, 1, 2], "words": ["beta", "Alpha", "gamma", "alpha"], "nested": [[1, 2], [3], []],
    "d": {"b": 1, "a": [1, 2], "C": {"x": None}, "items": 5, "get": 6}, "empty": {}, "el": [],
    "people": [{"name": "Ann", "age": 30, "tags": {"k": 1}}, {"name": "bob", "age": 25}, {"name": "Cy", "age": 30}],
    "big": 9007199254740993, "tiny": 1e-7, "huge": 1.5e300, "neg0": -0.0, "third": 0.3333333333333333, "quote": "it's \"q\" \\ \u0007 \u200b é",
    "html": "<a href='x'>&\"</a>",
}

EXPRESSIONS = r"""
1 + 2 * 3 - 4 // 3 % 5 ** 2 ;; 2 ** 3 ** 2 ;; -2 ** 2 ;; 7 / 2 ;; 7 // 2 ;; -7 // 2 ;; -7 % 3 ;; 7 % -3 ;; 7.5 // 2 ;; -7.5 % 2 ;; 2 ** -1 ;; 1e3 ;; 1_000 ;; 0x1F ;; 0b101 ;; 0o17 ;; 1.5e-3 ;; 10 / 5
1 ~ 2 + 3 ~ 4 ;; 'a' ~ n ~ f ~ t ~ no ~ missing ;; 1 + 2 ~ 3 * 4 ;; 'a' 'b' "c" ;; "\n\t\\\'\"\x41\u00e9\U0001F642\101\q" ;; 'a' * 3 ;; [1] * 2 + [2] ;; (1,) + (2, 3) ;; 'x' + 'y'
n > 3 and n < 10 ;; 1 < n <= 7 != 8 ;; not n == 7 ;; not not z ;; n in lst ;; 3 in lst ;; 'lo' in s ;; 'x' not in s ;; 'a' in d ;; 'q' in missing ;; no is none ;; 1 < 2 < 3 < 3
n if t else z ;; n if z ;; n if z else 'else' if t else 'x' ;; (n if no) is undefined ;; z or no or 'dflt' ;; n and 0 ;; n and s ;; '' or []
lst[0] ;; lst[-1] ;; lst[9] is defined ;; lst[1:] ;; lst[::-1] ;; lst[::2] ;; lst[-2:] ;; lst[:-1] ;; lst[5:] ;; lst[2:0:-1] ;; s[1:4] ;; s[::-1] ;; u[2] ;; u[-3:] ;; u[::3] ;; s[20] is defined ;; nested[0][1] ;; (1, 2, 3)[1:]
d.a ;; d['a'][1] ;; d.C.x ;; d.C.x.y is defined ;; d.nope is defined ;; d['items'] ;; d.items() | list ;; d.get('b') ;; d.get('q') ;; d.get('q', 'dd') ;; d.keys() | list ;; d.values() | list ;; d['get']
lst.0 ;; people.1.name ;; people[0]['tags']['k'] ;; people[0].tags.k ;; d.items is callable ;; s.upper is defined ;; messages[0].role ;; {'a': {'b': 1}}.a.b ;; [1, 2, [3, (4, 5)]]
[] ;; {} ;; () ;; (1,) ;; [1, 'a', none, true, 2.0, {'k': 'v'}] ;; {'a': 1, 2: 'b', none: true, 1.5: []} ;; {'x': 1}['x'] ;; {1: 'a', 1.0: 'b'} ;; [t, no, missing]
big ;; tiny ;; huge ;; neg0 ;; third ;; 1e16 ;; 1e15 ;; 123456789012345680.0 ;; 0.1 + 0.2 ;; 1e22 ;; 5e-324 ;; 1.7976931348623157e308 ;; 100000.0 ;; 1e-4 ;; 1e-5 ;; big + 1 ;; f * 2 ;; n / 7
quote ;; [quote] ;; [u] ;; ['a\'b'] ;; ["a\"b"] ;; ['a\'"b'] ;; [html, ws] ;; ['\u200b\u2028\ue000\U000e0001']
s|upper ;; s|lower ;; u|upper ;; u|lower ;; u|title ;; u|capitalize ;; s|title ;; 'foo-bar (baz) qux[x {y'|title ;; 'ÉCOLE d\'été'|title ;; 'hELLO wORLD'|capitalize ;; 'o\'neil'|title
ws|trim ;; ws|trim('x') ;; 'xxaxx'|trim('x') ;; s|length ;; u|length ;; lst|length ;; d|length ;; missing|length ;; n|string ;; s|count
s|replace('l', 'L') ;; s|replace('l', 'L', 1) ;; s|replace('', '-') ;; u|reverse ;; lst|reverse|list ;; s|reverse ;; lst|first ;; lst|last ;; el|first is defined ;; s|first ;; d|first ;; u|last
lst|join ;; lst|join(', ') ;; words|join('|') ;; people|join(', ', attribute='name') ;; people|map(attribute='name')|join('+') ;; [1, none, 2.5, true]|join(' ') ;; e|join('x') ;; s|join('.')
lst|sort ;; lst|sort(reverse=true) ;; words|sort ;; words|sort(case_sensitive=true) ;; people|sort(attribute='age')|map(attribute='name')|list ;; people|sort(attribute='age,name', reverse=true)|map(attribute='name')|list
no|selectattr('a')|list ;; f is divisibleby 2.5 ;; missing is callable ;; 'ŉß'.title() ;; '' % lst ;; z|map('upper')|list ;; no|reject|list ;; el|map('nope')|list ;; words|unique|list ;; words|unique(true)|list ;; [1, 1.0, true, 2]|unique|list ;; people|unique(attribute='age')|map(attribute='name')|list ;; lst|max ;; lst|min ;; words|max ;; words|min(case_sensitive=true) ;; el|max is defined ;; people|max(attribute='age')
lst|sum ;; people|sum(attribute='age') ;; lst|sum(start=10) ;; people|map(attribute='tags.k', default='-')|list ;; words|map('upper')|list ;; words|map('replace', 'a', 'A')|list ;; lst|map('string')|join
lst|select('odd')|list ;; lst|reject('odd')|list ;; lst|select|list ;; [0, 1, '', 'a']|reject|list ;; people|selectattr('age', 'equalto', 30)|map(attribute='name')|list ;; people|rejectattr('tags')|list ;; people|selectattr('age', '>', 26)|list|length
people|selectattr('tags', 'defined')|list|length ;; people|selectattr('name', 'in', ['Ann'])|list|length ;; lst|select('>', 1)|list ;; lst|select('divisibleby', 3)|list ;; words|select('equalto', 'beta')|first
missing|default('x') ;; no|default('x') ;; no|default('x', true) ;; e ;; d('y', boolean=true) ;; z|default(5) ;; missing|d is defined ;; missing.x is defined if false else 'ok'
'42'|int ;; '4.7'|int ;; 'x'|int ;; 'x'|int(9) ;; f|int ;; '0x1f'|int(base=16) ;; '101'|int(0, 2) ;; t|int ;; no|int ;; '1e3'|int ;; ' 12 '|int ;; '1_000'|int ;; '2.5'|float ;; 'x'|float ;; 'inf'|float ;; 3|float ;; '-.5'|float ;; 'nan'|float
f|round ;; 2.675|round(2) ;; 1234.567|round(-2) ;; 3|round ;; 2.5|round ;; 3.5|round ;; 7.1|round(0, 'ceil') ;; -7.1|round(0, 'floor') ;; 7.123|round(1, method='ceil') ;; 0.15|round(1) ;; 1e20|round ;; 25|round(-1) ;; 35|round(-1)
n|abs ;; neg|abs ;; -2.5|abs ;; lst|list ;; s|list ;; d|list ;; u|list ;; d|items|list ;; empty|items|list ;; missing|items|list ;; d|dictsort ;; d|dictsort(true) ;; d|dictsort(by='value') ;; {'b': 2, 'a': 3}|dictsort(by='value', reverse=true)
d|tojson ;; u|tojson ;; quote|tojson ;; lst|tojson ;; [1.0, none, true, 1e20, 'é']|tojson ;; d|tojson(indent=2) ;; nested|tojson(indent=4) ;; d|tojson(sort_keys=true) ;; u|tojson(ensure_ascii=true) ;; {1: 2, none: 3, true: 4, 1.5: 5}|tojson
d|tojson(separators=(',', ':')) ;; d|tojson(indent=0) ;; [[], {}]|tojson(indent=2) ;; {'a': '\u2028</script>\x7f'}|tojson ;; tiny|tojson ;; huge|tojson ;; (1, 2)|tojson ;; d|tojson(none, 1) ;; 'a'|tojson|safe
'a\nb\n\nc'|indent ;; 'a\nb\n\nc'|indent(2, true) ;; 'a\nb\n\nc'|indent(2, first=true, blank=true) ;; 'a\nb'|indent('> ') ;; 'a\n'|indent ;; ''|indent ;; 'a\r\nb\x0bc'|indent
lst|batch(2)|list ;; lst|batch(2, 'x')|list ;; '%s-%d' % ('a', 5) ;; '%05.1f|%-5s|%5s|%+d' % (2.25, 'ab', 'cd', 3) ;; '%s' % n ;; '%(a)s' % {'a': 1} ;; '%%' ;; '%s and %s'|format('x', 'y') ;; '%x %X %o' % (255, 255, 8) ;; '%r' % 'a' ;; '%.2s' % 'abc'
'{} {} {x}'.format(1, 'b', x=none) ;; '{0}{1}{0}'.format('a', 'b') ;; '{{}}'.format() ;; 'abc'|center(9) ;; 'ab'.center(5) ;; 'abc'.center(6, '*') ;; 'a'.ljust(3) ~ '|' ;; 'a'.rjust(3, '.') ;; '-5'.zfill(4) ;; 'x'|center
csv.split(',') ;; csv.split(',', 1) ;; csv.rsplit(',', 1) ;; ws.split() ;; ' a b  c '.split(None, 1) ;; ' a b  c '.rsplit(None, 1) ;; ''.split() ;; ''.split(',') ;; 'a--b'.split('--') ;; 'aXbX'.split('X') ;; s.split('o')[-1].lstrip(' ')
'xxabxx'.strip('x') ;; 'xxabxx'.lstrip('x') ;; 'xxabxx'.rstrip('xb') ;; ws.strip() ;; ws.lstrip() ;; ws.rstrip() ;; '\n\n a \n'.strip('\n') ;; 'éaé'.strip('é') ;; 'a\nb\r\nc\x0bd\u2028e'.splitlines() ;; 'a\nb\n'.splitlines(true)
s.startswith('He') ;; s.startswith(('x', 'H')) ;; s.endswith('ld') ;; s.startswith('l', 2) ;; s.startswith('') ;; s.endswith('lo', 0, 5) ;; s.find('o') ;; s.rfind('o') ;; s.find('q') ;; u.find('世') ;; s.index('W') ;; s.count('l') ;; s.count('') ;; s.find('o', 5) ;; s.find('l', -3)
s.replace('o', '0') ;; s.replace('o', '0', 1) ;; s.upper() ;; u.upper() ;; u.lower() ;; 'straße ß'.title() ;; 'they\'re bill\'s'.title() ;; s.swapcase() ;; s.capitalize() ;; 'ǆ'.capitalize() ;; 'ŉ'.upper() ;; 'ΑΣ'.lower() ;; 'İ'.lower() ;; 'ﬁ'.upper() ;; 'ﬁx'.capitalize()
'abc'.isalpha() ;; '12'.isdigit() ;; '²'.isdigit() ;; '½'.isnumeric() ;; 'a1'.isalnum() ;; ' '.isspace() ;; ''.isalpha() ;; 'Ab'.islower() ;; 'AB'.isupper() ;; 'Title Case'.istitle() ;; 'éé'.isalpha() ;; '٣'.isdecimal() ;; 'a'.isascii() ;; 'é'.isascii() ;; '\x1c'.isspace()
'pre-x'.removeprefix('pre-') ;; 'x.py'.removesuffix('.py') ;; 'a=b=c'.partition('=') ;; 'a=b=c'.rpartition('=') ;; 'abc'.partition('x') ;; ', '.join(['a', 'b']) ;; ''.join(words) ;; 'a\tb'.expandtabs(4) ;; lst.index(1) ;; lst.count(3) ;; d.copy() == d
n is number ;; f is number ;; t is number ;; t is integer ;; t is boolean ;; n is integer ;; f is float ;; s is string ;; lst is sequence ;; d is mapping ;; d is iterable ;; s is iterable ;; n is iterable ;; no is none ;; missing is undefined ;; missing is defined ;; d is sequence ;; lst is mapping
n is odd ;; n is even ;; n is divisibleby 7 ;; n is divisibleby(3) ;; s is lower ;; 'abc' is lower ;; 'ABC' is upper ;; n is eq 7 ;; n is ne(7) ;; n is gt 3 ;; n is lessthan 8 ;; n is in [7] ;; n is sameas n ;; t is true ;; t is false ;; no is sameas none ;; range is callable ;; s is not string ;; 1 is true
lst is defined and lst is not none ;; missing is iterable ;; missing is sequence ;; missing is string ;; (lst|map('string')) is sequence ;; (lst|map('string')) is iterable ;; d.items() is sequence ;; 'tojson' is filter ;; 'odd' is test ;; lst|map('string') is string
range(5)|list ;; range(2, 8, 3)|list ;; range(5, 0, -2)|list ;; range(0)|list ;; range(3)|last ;; dict(a=1, b=2) ;; dict([('x', 1)], y=2) ;; dict(d) ;; namespace(a=1).a ;; namespace({'k': 2}).k ;; namespace().x is defined
[1, 2] == [1, 2] ;; [1, 2] == (1, 2) ;; {'a': 1} == {'a': 1.0} ;; 'a' == 1 ;; 1 == 1.0 ;; true == 1 ;; none == false ;; missing == missing2 ;; missing == none ;; [1, 2] < [1, 3] ;; 'a' < 'b' ;; 'é' > 'z' ;; 1 < 1.5 ;; true < 2 ;; (1, 'a') < (1, 'b')
messages|length ;; messages[-1] ;; messages[::-1][0].content ;; tools ;; documents ;; add_generation_prompt ;; messages|selectattr('role', 'equalto', 'user')|list|length ;; messages|map(attribute='role')|list
(lst|map('string'))|first ;; (people|selectattr('age', 'equalto', 99)) and 'truthy' ;; (people|selectattr('age', 'equalto', 99)|list) or 'falsy' ;; 'yes' if people|rejectattr('age') else 'no' ;; 3 in (lst|select) ;; lst|wordcount ;; 'a b-c d\'e'|wordcount ;; d|attr('keys') is callable ;; s|attr('nope') is defined
'&' + (html|safe) ;; (html|safe) + '<' ;; (html|safe) ~ '<' ;; (html|safe)|upper ;; (html|safe).replace('<', '>') ;; '<' * 2 + ('x'|safe) ;; (html|safe)|trim ;; html|string ;; (html|safe)|length ;; ('%s <'|safe) % '<' ;; ('x'|safe).join(['<', 'a']) ;; (html|safe)|tojson
"""

ERRORS = r"""
missing + 1 ;; missing.x ;; missing['x'] ;; missing() ;; missing|tojson ;; no + 1 ;; no() ;; n() ;; 'a' + 1 ;; 1 + 'a' ;; lst + (1,) ;; [] < 1 ;; n.x.y ;; lst|first(1) ;; 1 / 0 ;; 1 // 0 ;; 1 % 0 ;; 'a' * 'b' ;; -s ;; d.items.x.y ;; for ;; 5 in 5 ;; 1 in 'a' ;; none in 'a'
lst.append(1) ;; d.update({}) ;; d.pop('a') ;; s.nope() ;; raise_exception('stop') ;; range(1000000) ;; lst|sort('x', 'y', 'z', 'w') ;; [1, 'a']|sort ;; {[]: 1} ;; n|length ;; n|list ;; n|join ;; '%d' % 'a' ;; '%s %s' % 'a' ;; '{}'.format() ;; 'abc'.index('z') ;; ''.split('')
-missing ;; f[:2] ;; (lst|map('string'))[:1] ;; n|indent ;; d[1:] ;; missing < 1 ;; lst|round ;; 'x'|abs ;; d|dictsort(by='z') ;; ('a', 'b')|sum ;; lst[::0] ;; lst['a':] ;; dict(1) ;; namespace(_x=1) ;; (lst|map('string'))|length ;; (lst|map('string'))|last ;; (lst|map('string'))|tojson ;; d.items()|tojson ;; range(1, 2, 0) ;; 1 ** 'a'
"""

STATEMENTS = [
    "{% for x in lst %}{{ loop.index }}/{{ loop.length }}:{{ x }}{% if not loop.last %}, {% endif %}{% else %}none{% endfor %}",
    "{% for x in el %}a{% else %}none{% endfor %}|{% for x in missing %}a{% else %}undef{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for a, (b, c) in [(1, (2, 3))] %}{{ a + b + c }}{% endfor %}",
    "{% for x in lst if x > 1 %}{{ loop.index0 }}{{ x }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.revindex0 }} {% endfor %}",
    "{% for x in lst %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem is defined }} {{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for x in nested %}{% for y in x %}{{ loop.depth }}{{ y }}{% else %}E{% endfor %}{{ loop.depth0 }}{% endfor %}",
    "{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x > 4 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in lst %}{% set y = x %}{% endfor %}{{ y is defined }}{{ x is defined }}{{ loop is defined }}",
    "{% set y = 1 %}{% for x in lst %}{{ y }}{% set y = y + x %}{{ y }} {% endfor %}{{ y }}",
    "{% set ns = namespace(c=0, l=[]) %}{% for x in lst %}{% set ns.c = ns.c + x %}{% set ns.l = ns.l + [x] %}{% endfor %}{{ ns.c }}{{ ns.l }}{{ ns['c'] }}",
    "{% if n > 5 %}a{% elif n > 3 %}b{% else %}c{% endif %}{% if z %}x{% elif t %}y{% endif %}{% if no %}q{% endif %}",
    "{% if t %}{% set q = 1 %}{% endif %}{{ q }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set c = 1, 2 %}{{ c }}{% set (p, q) = 'xy' %}{{ p }}{{ q }}",
    "{% set b %}text {{ n }}{% endset %}[{{ b }}]{% set b | upper | trim %} text {% endset %}[{{ b }}]{{ b is string }}",
    "{% macro m(a, b=2, c='x') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}|{{ m(1, c=3) }}|{{ m(a=5, b=6) }}|{{ m() }}|{{ m(1)|upper }}|{{ m.name }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, k=4) }}{{ m(1) }}",
    "{% macro m(a, b=a) %}{{ b }}{% endmacro %}{{ m(3) }}",
    "{% set o = 1 %}{% macro m() %}{{ o }}{{ late }}{% endmacro %}{% set late = 2 %}{% set o = 5 %}{{ m() }}{% for o in [9] %}{{ m() }}{% endfor %}",
    "{% macro f(x) %}{% if x > 0 %}{{ x }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}body {{ n }}{% endcall %}",
    "{% macro m(l) %}{% for x in l %}{{ caller(x, loop.index) }}{% endfor %}{% endmacro %}{% call(x, i) m(lst) %}[{{ x }}{{ i }}]{% endcall %}",
    "{% macro m() %}{% if caller %}y{{ caller() }}{% else %}n{% endif %}{% endmacro %}{{ m() }}{% call m() %}b{% endcall %}",
    "{% filter upper %}abc {{ s }}{% endfilter %}{% filter replace('a', 'b') | trim %} aaa {% endfilter %}",
    "{% with a = 1, b = n %}{{ a + b }}{% endwith %}{{ a is defined }}{% with %}{% set q = 1 %}{% endwith %}{{ q is defined }}",
    "{% raw %}{{ n }} {% if %}{% endraw %}|{%- raw -%}  x {{ }}  {%- endraw -%}  |",
    "{# comment {{ n }} #}a{#- c -#}  b  {#- d #}\n c",
    "a\n  {% if t %}\n  b\n  {% endif %}\nc\n",
    "a\n  {%- if t %}\n  b\n  {%- endif -%}\n  c\n\n",
    "a\n  {%+ if t %}\n  b\n  {% endif +%}\nc",
    "  {{ n }}  \n  {{- n }}  \n  {{ n -}}  \n x",
    "{% for x in lst %}\n  {{ x }}\n{% endfor %}\nend\n\n",
    "line1\r\nline2\rline3\r\n{% if t %}\r\nx{% endif %}\r\n",
    "{% if t %}a{% endif %}\n\nb {% if t %} c {% endif %} d\n\t{# x #}\ne",
    "{{ 'multi\nline' }}{{ {'a': {'b': 1}}['a'] }}{{ '}}' }}{{ \"%}\" }}{% set x = {'k': '%}'} %}{{ x }}",
    "{{ n }}{{+ n }}{{- n -}} {{ n|string|length }}",
    "{% print n, s %}{% set x = [] %}{{ x }}{% set y = {} %}{{ y }}",
    "{% generation %}abc{% endgeneration %}é{% generation %}{{ u }}{% set inner = 1 %}{% endgeneration %}{{ inner is defined }}x",
    "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}\n{% endgeneration %}{% endfor %}",
    "{%- for m in messages -%} {{- m.role ~ ':' -}} {%- endfor -%}",
    "{% set x = lst|map('string') %}{% for a in x %}{{ a }}{% endfor %}{% for a in x %}{{ a }}{% else %}used{% endfor %}",
    "{% set x = [1,2] %}{% set x = x + [3] %}{{ x }}{% set m = messages + [{'role': 'x'}] %}{{ m|length }}",
    "{{ messages[0]['content'] if messages[0]['role'] == 'user' else 'none' }}{% if messages[0].role == 'user' and messages[0].content is string %}ok{% endif %}",
    "{% set loop_messages = messages[1:] %}{% for m in loop_messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ 'odd' }}{% endif %}{% endfor %}",
    "{% macro render(c) -%}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}{%- endmacro -%}[{{ render('x') }}{{ render([{'text': 'y'}]) }}]",
    "{% set a = 'x' %}{% macro m() %}{% set a = 'in' %}{{ a }}{% endmacro %}{{ m() }}{{ a }}",
    "{% for a in [1] %}{% macro inner() %}{{ a }}{% endmacro %}{{ inner() }}{% endfor %}{{ inner is defined }}",
    "{{ strftime_now('') }}{{ strftime_now('%Y')|length }}",
    "{% set x %}{% for i in lst %}{{ i }}{% if i == 1 %}{% break %}{% endif %}{% endfor %}{% endset %}{{ x }}",
    "{% if tools is not none and tools|length > 0 %}t{% else %}no tools{% endif %}{% if not add_generation_prompt is defined %}u{% endif %}",
    "{{ [{'a': 1}, {'a': 2}]|map(attribute='a')|map('string')|join('-') }}{{ (1, 2)|join }}{{ 'abc'|list|join('-') }}",
    "{{ lst | map(attribute=0) | list }}{{ nested | map('first') | list }}{{ nested | map(attribute=0) | list }}",
    "{% set s2 = 'a' if t %}{{ s2 }}{% set s3 = 'a' if no %}[{{ s3 }}]",
    "{% for x in [1,2,3] %}{% if loop.first %}{% set ns = namespace(v=x) %}{% endif %}{{ ns.v if ns is defined }}{% endfor %}",
    "{% for x in [{'r': 1}, {'r': 2}] %}{{ loop.previtem.r if loop.previtem }}{{ loop.nextitem.r if loop.nextitem is defined }};{% endfor %}",
    "{% for c in s %}{{ c }}.{% endfor %}{% for c in u[:3] %}{{ c }}|{% endfor %}",
    "{% if not (messages and messages[0].role) %}x{% endif %}{{ not messages }}{{ messages is iterable and messages is not mapping }}",
]

BAD_SYNTAX = ["{% if %}", "{% for x in %}{% endfor %}", "{{ 1 + }}", "{% endif %}", "{% if t %}", "{{ 'a }}", "{{ (1 }}", "{{ 1 } }}", "{# x", "{% set 1 = 2 %}",
              "{% set true = 2 %}", "{{ x|nope }}", "{{ x is nope }}", "{% nope %}", "{{ a b }}", "{% for x in lst %}{% endif %}", "{% macro m(a=1, b) %}{% endmacro %}",
              "{{ m(a=1, 2) }}", "{{ }}", "{% raw %}x", "{{ [1, 2 }}", "{{ {1} }}", "{{ x. }}", "{{ 1 is }}", "{% break %}", "{{ ] }}", "{{ a is b is c }}"]

MESSAGES = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Ho"}]


def answer(source, messages=MESSAGES, variables=VARIABLES, tools=None, prompt=False):
    try:
        text, spans = render_jinja_template([messages], tools=tools, chat_template=source, add_generation_prompt=prompt,
                                            return_assistant_tokens_mask="generation" in source, **variables)
        spans = [[len(text[0][:a].encode()), len(text[0][:b].encode())] for a, b in (spans[0] if spans else [])]
        return {"text": text[0], "spans": spans}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:100]}


def split(block):
    return [expression for line in block.strip().splitlines() for expression in line.split(" ;; ")]


def jinja_cases():
    sources = ["[{{ " + expression + " }}]" for expression in split(EXPRESSIONS) + split(ERRORS)] + STATEMENTS + BAD_SYNTAX
    return {"messages": MESSAGES, "variables": VARIABLES, "cases": [{"template": source, **answer(source)} for source in sources],
            "conversations": [{"messages": messages, "tools": tools, "prompt": prompt,
                               **answer((ROOT / "examples/tokenizer-4k/chat_template.jinja").read_text(), messages, variables, tools, prompt),
                               "variables": variables}
                              for messages in FIXED for tools, prompt, variables in
                              [(None, True, {}), (TOOLS, False, {"enable_thinking": False}), (None, True, {"enable_thinking": False})]]}


def tokenizer_cases():
    tokenizer = Tokenizer.from_file(str(ROOT / "examples/tokenizer-4k/tokenizer.json"))
    rng = random.Random(5)
    texts = [b"", b" ", b"Hello world", b"<|im_start|>user\nHi<|im_end|>\n", "It's a naïve café — 東京 🙂".encode(), b"x" * 300, b" " * 129]
    texts += [random_text(rng, n).encode() for n in (1, 29, 63, 64, 65, 129, 500, 1500)] + [random_bytes(rng, 300) for _ in range(12)]
    return [{"hex": text.hex(), "ids": tokenizer.encode(text.decode("utf-8", "replace")).ids} for text in texts]


def main():
    files = {"jinja_golden.json": json.dumps(jinja_cases(), ensure_ascii=True, indent=0) + "\n",
             "tokenizer_golden.json": json.dumps(tokenizer_cases()) + "\n"}
    for name, text in files.items():
        path = ROOT / "tests/data" / name
        if "--check" not in sys.argv:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"{path} is not what this script makes")


if __name__ == "__main__":
    main()
