"""The chat-template half of make_text.py: templates that use the constructs of real model families,
and random programs of the supported subset, with the text that jinja2 makes of them."""
import datetime
import json
import random

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

NOW = datetime.datetime(2024, 7, 6, 9, 5, 3)


def never_constant(*_):
    raise jinja2.nodes.Impossible()


# Folded, a slice of a number or dict literal is undefined; run, it is a TypeError. Only the latter
# says what the language means.
jinja2.nodes.Getitem.as_const = never_constant


def environment(optimized=True):
    """Jinja2 set up as transformers sets it up for chat templates."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=optimized,
        extensions=[jinja2.ext.loopcontrols])

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: NOW.strftime(form)
    return env


TEMPLATES = {
    "chatml": """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    # A header a message, BOS with the first one, contents trimmed.
    "headers": """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}
""",
    # System text apart, dates, tools in three places, all of it parsed though tools is none.
    "tools_and_dates": """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "01 Jan 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The first message is the system's, or there is none. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_text = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_text = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: python\\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'interpreter') | join(", ") + "\\n\\n" }}
{%- endif %}
{{- "Cutoff: December\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_text }}
{{- "<|eot|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_text = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Tools need a first user message") }}
    {%- endif %}
    {{- '<|head|>user<|/head|>\\n\\n' -}}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_text + "<|eot|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One tool call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- if builtin_tools is defined and call.name in builtin_tools %}
            {{- '<|head|>assistant<|/head|>\\n\\n' -}}
            {{- "<|py|>" + call.name + ".call(" }}
            {%- for arg_name, arg_val in call.arguments | items %}
                {{- arg_name + '="' + arg_val + '"' }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- endif %}
            {%- endfor %}
            {{- ")" }}
        {%- else %}
            {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}
        {%- endif %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|head|>ipython<|/head|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\\n\\n' }}
{%- endif %}
""",
    # A default system message, runs of tool answers gathered in one user turn.
    "default_system": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0]['content'] if messages[0]['role'] == 'system' else 'You help.' }}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<call>{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ (tool_call.arguments | tojson) ~ '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<answer>\\n' + message.content + '\\n</answer>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    # Reasoning is cut out of old answers; a namespace carries state out of a loop run backwards.
    "thinking": """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<answer>') and message.content.endswith('</answer>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or (not loop.last and reasoning)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    # Roles must alternate; a macro writes a turn.
    "alternating": """{%- macro turn(role, text, close=true) %}
[{{ role | upper }}] {{ text.strip() }}{% if close %} [/{{ role|upper }}]{% endif +%}
{%- endmacro %}
{% if messages[0]["role"] == "system" %}
  {% set system = messages[0]["content"] | trim ~ "\\n\\n" %}
  {% set rest = messages[1:] %}
{% else %}
  {% set system = "" %}{% set rest = messages %}
{% endif %}
{{ bos_token }}
{%- for message in rest if message.role != 'note' %}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Roles must alternate: found ' ~ message.role ~ ' at ' ~ loop.index) }}
  {%- endif %}
  {%- if message.role == "user" %}
{{ turn("inst", system + message.content if loop.first else message.content) }}
  {%- else %}
{{ turn('out', text=message.content, close=not loop.last) }}{{ eos_token }}
  {%- endif %}
{%- else %}
nothing to say
{%- endfor %}
""",
}

CHATS = [
    [("user", "Hello!")],
    [("system", "  Be brief.\n"), ("user", "Hi <b>there</b> & \"you\"\n\n"), ("assistant", " Hello. "),
     ("user", "What is 2+2?\n")],
    [("user", "one"), ("assistant", "<think>\nlet me see\n</think>\n\nanswer"), ("user", "two"),
     ("assistant", "<think>\nmore\n</think>\n\nlast")],
    [("user", "日本語 😀"), ("user", "twice"), ("note", "n"), ("tool", "{\"x\": 1}"), ("tool", "42"),
     ("assistant", "ok")],
    [("system", "only a system message")],
]


def render(env, source, messages, variables):
    """The text, or None and the message when the template fails."""
    try:
        template = env.from_string(source)
        return template.render(messages=[{"role": r, "content": c} for r, c in messages],
                               tools=None, documents=None, **variables), None
    except Exception as fault:  # whatever Python raises, the other side must refuse too
        return None, str(fault)


class Programs:
    """Random programs, typed loosely enough that a few of them fail."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.names = {"int": ["n"], "str": ["name"], "list": ["items"], "bool": ["yes"]}
        self.loops = 0

    def pick(self, *choices):
        return self.rng.choice(choices)

    def expr(self, kind, depth):
        if self.rng.random() < 0.015:  # the wrong type
            kind = self.pick("int", "str", "list", "bool", "dict")
        return getattr(self, kind)(depth - 1)

    def literal(self):
        return self.pick("''", "'a'", '"b c"', "'Ab, cd'", "' x\\n'", "'\\tq\\\\'", "'é漢😀'", "'a-b-a'",
                         '"it\'s"', "'{{ }}'")

    def str(self, depth):
        if depth <= 0:
            return self.pick(self.literal(), self.pick(*self.names["str"]), "messages[0].role",
                             "messages[-1]['content']")
        s = self.expr("str", depth)
        return self.pick(
            lambda: f"{s} + {self.expr('str', depth)}",
            lambda: f"{s} ~ {self.expr(self.pick('int', 'str', 'bool', 'list'), depth)}",
            lambda: f"({s}).{self.pick('upper', 'lower', 'strip', 'title', 'capitalize')}()",
            lambda: f"({s}).{self.pick('lstrip', 'rstrip', 'strip')}({self.literal()})",
            lambda: f"({s}).replace({self.literal()}, {self.literal()})",
            lambda: f"({s})[{self.bound(depth)}:{self.bound(depth)}]",
            lambda: f"({s})[::{self.pick(-1, 2, -2)}]",
            lambda: f"({s})[{self.pick(0, 1, -1, 5)}]",
            lambda: f"({s}) | {self.pick('trim', 'upper', 'lower', 'title', 'capitalize', 'string', 'reverse')}",
            lambda: f"({s}) | replace({self.literal()}, 'Z')",
            lambda: f"({self.expr('list', depth)}) | join({self.literal()})",
            lambda: f"({self.expr(self.pick('list', 'dict', 'int', 'str', 'bool'), depth)}) | tojson"
                    + self.pick("", "", "(indent=2)", "(ensure_ascii=true)"),
            lambda: f"({s} if {self.expr('bool', depth)} else {self.expr('str', depth)})",
            lambda: f"missing | default({s})",
            lambda: f"{s} * {self.pick(0, 2, 3)}",
            lambda: f"({self.expr('dict', depth)}).get('k', {s})",
        )()

    def bound(self, depth):
        return self.pick("", "", "1", "-1", "2", "-3", "7", self.pick(*self.names["int"]))

    def int(self, depth):
        if depth <= 0:
            return self.pick("0", "1", "2", "7", "-3", "10", self.pick(*self.names["int"]),
                             "loop.index" if self.loops else "3",
                             "loop.length" if self.loops else "4")
        i = self.expr("int", depth)
        return self.pick(
            lambda: f"{i} {self.pick('+', '-', '*')} {self.expr('int', depth)}",
            lambda: f"({i}) {self.pick('//', '%')} {self.pick(1, 2, 3, -2, 0)}",
            lambda: f"({i}) / {self.pick(1, 2, 4, 8)}",
            lambda: f"({self.expr(self.pick('str', 'list', 'dict'), depth)}) | length",
            lambda: f"({i}) | abs",
            lambda: f"-({i})",
            lambda: f"({self.pick(1, 2, 3)}) ** {self.pick(0, 2, 3, -1)}",
            lambda: f"{self.literal()} | int({self.pick(0, 5)})",
            lambda: f"'{self.pick('12', ' 7 ', '1.5', 'x', '-3')}' | {self.pick('int', 'float')}",
            lambda: f"({self.expr('str', depth)}).{self.pick('find', 'count', 'rfind')}({self.literal()})",
        )()

    def bool(self, depth):
        if depth <= 0:
            return self.pick("true", "false", "yes", "missing", "none", "loop.first" if self.loops else "yes",
                             "loop.last" if self.loops else "True")
        kind = self.pick("int", "str", "list")
        a, b = self.expr(kind, depth), self.expr(kind, depth)
        return self.pick(
            lambda: f"({a}) {self.pick('==', '!=')} ({b})",
            lambda: f"{self.expr('int', depth)} {self.pick('<', '<=', '>', '>=')} {self.expr('int', depth)}",
            lambda: f"1 < {self.expr('int', depth)} <= 5",
            lambda: f"{self.literal()} {self.pick('in', 'not in')} ({self.expr(self.pick('str', 'list', 'dict'), depth)})",
            lambda: f"{self.expr('bool', depth)} {self.pick('and', 'or')} {self.expr('bool', depth)}",
            lambda: f"not ({self.expr('bool', depth)})",
            lambda: f"({a}) is {self.pick('', 'not ')}{self.pick('string', 'mapping', 'iterable', 'sequence', 'number', 'integer', 'float', 'boolean', 'none', 'true', 'false', 'defined')}",
            lambda: f"{self.pick('missing', 'name', 'messages[9]', 'messages[0].x')} is {self.pick('defined', 'undefined', 'not defined', 'none')}",
            lambda: f"({self.expr('int', depth)}) is {self.pick('odd', 'even', 'divisibleby(3)', 'gt 2', 'eq(1)')}",
            lambda: f"({self.expr('str', depth)}).{self.pick('startswith', 'endswith')}({self.literal()})",
        )()

    def list(self, depth):
        if depth <= 0:
            return self.pick("[]", "[1, 2, 3]", "['x', 'y']", "[none, true, 1.5]", "(1, 'b')",
                             self.pick(*self.names["list"]), "range(4)|list")
        lst = self.expr("list", depth)
        return self.pick(
            lambda: f"[{self.expr('int', depth)}, {self.expr('str', depth)}]",
            lambda: f"({lst})[{self.bound(depth)}:{self.bound(depth)}]",
            lambda: f"({lst})[::-1]",
            lambda: f"({lst}) + ({self.expr('list', depth)})",
            lambda: f"({self.expr('str', depth)}).split({self.pick(self.literal(), '', self.literal() + ', 1')})",
            lambda: f"({self.expr('str', depth)}) | list",
            lambda: f"({lst}) | reverse | list",
            lambda: f"range({self.pick(0, 2, 5)}, {self.pick(1, 3, 9)}, {self.pick(1, 2, -1)}) | list",
            lambda: f"({self.expr('dict', depth)}).{self.pick('keys', 'values', 'items')}() | list",
            lambda: f"({self.expr('dict', depth)}) | list",
            lambda: f"messages | map(attribute='{self.pick('role', 'content', 'x')}') | list",
            lambda: f"messages | {self.pick('select', 'reject')}attr('role', '{self.pick('eq', 'ne', 'in')}', 'user') | map(attribute='content') | list",
            lambda: f"({lst}) | {self.pick('select', 'reject')}('{self.pick('string', 'integer', 'none', 'defined')}') | list",
            lambda: f"({lst}) | map('string') | list",
            lambda: f"'a\\nb\\r\\nc' | trim | list" if self.rng.random() < .3 else f"({self.expr('str', depth)}).splitlines()",
        )()

    def dict(self, depth):
        if depth <= 0:
            return self.pick("{}", "{'k': 1}", "{'a': [1, {'b': none}], 'k': 'v'}")
        return (f"{{'k': {self.expr(self.pick('int', 'str', 'list'), depth)}, "
                f"{self.literal()}: {self.expr(self.pick('bool', 'dict'), depth)}}}")

    def open(self):
        return "{%" + self.pick("", "", "-", "+")

    def close(self):
        return self.pick("", "", "-", "+") + "%}"

    def statement(self, depth):
        o, c = self.open, self.close
        kind = self.pick("out", "out", "out", "text", "set", "if", "for", "comment", "block", "ns",
                         "raw", "macro", "flow")
        if kind == "text":
            return self.pick(" ", "\n", "text\n", "  \n", "\t", "a b", "  \n  ", "é\n")
        if kind == "set":
            t = self.pick("int", "str", "list")
            name = self.pick("u", "v", "w")
            value = self.expr(t, depth)
            if not self.loops:
                for names in self.names.values():
                    if name in names:
                        names.remove(name)
                self.names[t].append(name)
            return f"{o()} set {name} = {value} {c()}"
        if kind == "comment":
            return "{#" + self.pick("", "-") + " note " + self.pick("", "-") + "#}" + self.pick("", "\n")
        if kind == "raw":
            return f"{o()} raw {self.pick('', '-')}%}}{{{{ x }}}}\n {o()} endraw {c()}"
        if depth > 0:
            if kind == "if":
                middle = self.pick("", f"{o()} elif {self.expr('bool', 2)} {c()}{self.body(depth)}")
                other = self.pick("", f"{o()} else {c()}{self.body(depth)}")
                return f"{o()} if {self.expr('bool', 2)} {c()}{self.body(depth)}{middle}{other}{o()} endif {c()}"
            if kind == "for":
                head = self.pick(f"x in {self.expr('list', 2)}", f"x in {self.expr('str', 1)}",
                                 f"x in items if x is string", f"x, y in {self.expr('dict', 2)}.items()",
                                 f"x in range({self.pick(0, 1, 3)})")
                self.loops += 1
                body = self.body(depth) + self.pick("{{ x }}", "{{ loop.index }}", "{{ loop.last }}",
                                                    "{{- loop.revindex0 -}}", "{{ loop.previtem }}", "")
                self.loops -= 1
                other = self.pick("", f"{o()} else {c()}none\n")
                return f"{o()} for {head} {c()}{body}{other}{o()} endfor {c()}"
            if kind == "block":
                self.loops += 1  # no macro in it
                body = self.body(depth)
                self.loops -= 1
                return f"{o()} set b {c()}{body}{o()} endset {c()}{{{{ b }}}}"
            if kind == "ns":
                return (f"{o()} set ns = namespace(i=0) {c()}{o()} for x in range(3) {c()}"
                        f"{o()} set ns.i = ns.i + {self.pick('x', '1', 'loop.index0')} {c()}"
                        f"{o()} endfor {c()}{{{{ ns.i }}}}")
            if kind == "macro" and not self.loops:
                return (f"{o()} macro f(p, q={self.expr('int', 1)}) {c()}{{{{ p }}}}/{{{{ q }}}}{o()} endmacro {c()}"
                        f"{{{{ f({self.expr('str', 1)}{self.pick('', ', 2', ', q=[1]')}) }}}}")
        if kind == "flow" and self.loops:
            return f"{o()} if {self.expr('bool', 1)} {c()}{o()} {self.pick('break', 'continue')} {c()}{o()} endif {c()}"
        kind = self.pick("int", "str", "bool", "list", "dict", "str", "int")
        return ("{{" + self.pick("", "", "-") + " " + self.expr(kind, 3) + " "
                + self.pick("", "", "-") + "}}")

    def body(self, depth):
        return "".join(self.statement(depth - 1) for _ in range(self.rng.randint(1, 2)))

    def program(self):
        self.names = {"int": ["n"], "str": ["name"], "list": ["items"], "bool": ["yes"]}
        return "".join(self.statement(2) for _ in range(self.rng.randint(1, 4)))


PROGRAM_CHAT = [("system", "Sys é"), ("user", "Hi there"), ("user", "a-b-a")]
PROGRAM_VARIABLES = {"name": "Ada L.", "yes": True, "add_generation_prompt": True}
PROGRAM_PREAMBLE = "{% set n = 4 %}{% set items = ['p', 2, none, 'q r'] %}"


def printable_only(text):
    """Generators print as addresses in jinja2: such programs say nothing."""
    return text is None or " at 0x" not in text and "<generator" not in text and "dict_" not in text


def write(out):
    env, plain = environment(), environment(optimized=False)
    cases = []
    for name, source in TEMPLATES.items():
        for chat in CHATS:
            for variables in ({"add_generation_prompt": True},
                              {"add_generation_prompt": False, "enable_thinking": False,
                               "date_string": "31 Dec 1999"}):
                given = dict(variables, bos_token="<|bos|>", eos_token="<|eos|>")
                text, fault = render(env, source, chat, given)
                cases.append({"template": name, "chat": chat, "variables": given, "text": text,
                              "error": fault})
    (out / "template_cases.json").write_text(json.dumps(
        {"templates": TEMPLATES, "now": list(NOW.timetuple()[:6]), "cases": cases},
        ensure_ascii=False, separators=(",", ":")))

    (out / "template_programs.json").write_text(json.dumps(
        {"preamble": PROGRAM_PREAMBLE, "chat": PROGRAM_CHAT, "variables": PROGRAM_VARIABLES,
         "programs": random_programs(env, plain, 77, 500)},
        ensure_ascii=False, separators=(",", ":")))


def random_programs(env, plain, seed, count):
    """[source after the preamble, text or None when it fails] for each program."""
    programs, made = [], Programs(seed)
    failing = 0
    while len(programs) < count:
        source = PROGRAM_PREAMBLE + made.program()
        text, fault = render(env, source, PROGRAM_CHAT, PROGRAM_VARIABLES)
        # Where folding constants changes the result neither is right.
        if render(plain, source, PROGRAM_CHAT, PROGRAM_VARIABLES)[0] != text:
            continue
        if fault and ("iterator" in fault or "generator" in fault):
            continue  # filters that yield one by one in jinja2 give lists here
        # A share of failing programs is enough, and long ones only fill the file.
        if not printable_only(text) or len(source) > 500 or (text and len(text) > 400):
            continue
        if text is None:
            failing += 1
            if failing * 12 > count:
                continue
        programs.append([source[len(PROGRAM_PREAMBLE):], text])
    return programs
