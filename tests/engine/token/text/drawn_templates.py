"""Templates drawn from what published ones are made of."""
# ruff: noqa: E501

from hypothesis import strategies as st

_LEAVES = [
    "messages[0].content", "messages[-1]['content']", "m.content", "m.role", "m['name']", "m.tool_calls", "m", "messages",
    "m.tool_calls[0].function.arguments", "m.get('reasoning_content')", "tools", "tools[0].function", "documents",
    "bos_token", "sep_token", "add_generation_prompt", "enable_thinking", "nothing", "x", "ns.a", "loop.index",
    "none", "true", "false", "0", "1", "7", "1.0", "2.5", "1e20", "''", "' a b '", "'é<&>'", "'a,b'", "'%s'", "'<think>\\n'",
    "[]", "[1, 'b', none]", "['b', 'a']", "{}", "{'b': 1.5, 'é': '<'}", "(1, 2)",
]  # fmt: skip
_FILTERS = [
    "trim", "upper", "lower", "title", "capitalize", "length", "count", "tojson", "tojson(indent=2)", "list", "first", "last",
    "string", "int", "float", "abs", "round", "join", "join(', ')", "sort", "unique | list", "reverse", "reverse | list",
    "default('d')", "default('d', true)", "replace('a', '-')", "indent(2)", "wordcount", "dictsort", "items | list", "safe",
    "e", "sum", "min", "max", "batch(2) | list", "map('upper') | list", "map(attribute='role') | list", "select | list",
    "selectattr('role', 'equalto', 'user') | list", "rejectattr('content') | list", "format('x')", "truncate(3)", "pprint",
    "groupby('role') | list", "striptags", "urlencode", "center(9)", "xmlattr", "wordwrap(3)", "attr('content')", "nothing",
]  # fmt: skip
_TESTS = [
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer", "float", "boolean", "true",
    "false", "callable", "odd", "lower", "in 'abc'", "equalto 1", "sameas none", "divisibleby 2", "eq 'a'", "nothing",
]  # fmt: skip
_METHODS = [
    "strip()", "lstrip('\\n')", "split()", "split('</think>')[-1]", "split(',')", "rsplit(' ', 1)[0]", "startswith('a')",
    "endswith('>')", "removeprefix('a')", "removesuffix('b')", "upper()", "title()", "replace('a', 'b')", "splitlines()",
    "partition(' ')", "zfill(5)", "find('b')", "count('a')", "items()", "keys() | list", "values() | list", "get('role')",
    "get('x', 1)", "format(1)", "join(['a', 'b'])", "isdigit()", "encode('utf-8')", "index('b')", "copy()", "append(1)", "content",
    "function.name", "role", "nothing", "__class__", "pop()",
]  # fmt: skip
_OPERATORS = ["+", "-", "/", "//", "%", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or"]
_SUBSCRIPTS = ["0", "-1", "1:", "::-1", ":2", "'content'", "'x'", "9"]


def _wider(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def made(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.tuples(*parts).map(lambda drawn: form.format(*drawn))

    return st.one_of(
        made("{} | {}", inner, st.sampled_from(_FILTERS)),
        made("({}).{}", inner, st.sampled_from(_METHODS)),
        made("({} is {})", inner, st.sampled_from(_TESTS)),
        made("({} is not {})", inner, st.sampled_from(_TESTS)),
        made("({} {} {})", inner, st.sampled_from(_OPERATORS), inner),
        made("({})[{}]", inner, st.sampled_from(_SUBSCRIPTS)),
        made("({} if {} else {})", inner, inner, inner),
        made("({} if {})", inner, inner),
        made("(not {})", inner),
        made("[{}, {}]", inner, inner),
        made("{{'k': {}}}", inner),
    )


_EXPRESSIONS = st.recursive(st.sampled_from(_LEAVES), _wider, max_leaves=4)
_TEXT = st.sampled_from(["a", "\n", "  ", "\n\n", " \n  ", "<|im_start|>", "\r\n", "é", "{# c #}", "{#- c -#}", "\t"])
_OPEN, _CLOSE = st.sampled_from(["{%", "{%-", "{%+"]), st.sampled_from(["%}", "-%}", "+%}"])


@st.composite
def _tag(draw: st.DrawFn, *words: str) -> str:
    return f"{draw(_OPEN)} {' '.join(words)} {draw(_CLOSE)}"


@st.composite
def _statement(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    body, value = draw(inner), draw(_EXPRESSIONS)

    def tag(*words: str) -> str:
        return draw(_tag(*words))

    match draw(st.integers(0, 11)):
        case 0 | 1:
            return tag("for m in messages") + body + tag("endfor")
        case 2:
            return tag("for x in", value) + body + tag("else") + draw(inner) + tag("endfor")
        case 3 | 4:
            return (
                tag("if", value)
                + body
                + tag("elif", draw(_EXPRESSIONS))
                + draw(inner)
                + tag("else")
                + "n"
                + tag("endif")
            )
        case 5:
            return tag("set x =", value)
        case 6:
            return tag("set x") + body + tag("endset")
        case 7:
            return (
                tag("set ns = namespace(a=1)")
                + tag("for m in messages")
                + body
                + tag("set ns.a =", value)
                + tag("endfor")
            )
        case 8:
            return tag("macro f(x, y=1)") + body + tag("endmacro") + f"{{{{ f({value}) }}}}"
        case 9:
            return tag("generation") + body + tag("endgeneration")
        case 10:
            word = draw(st.sampled_from(["break", "continue"]))
            return tag("for m in messages") + tag("if", value) + tag(word) + tag("endif") + body + tag("endfor")
        case _:
            return tag("if", value) + "{{ raise_exception('no') }}" + tag("endif") + body


_PRINTED = st.tuples(st.sampled_from(["{{", "{{-"]), _EXPRESSIONS, st.sampled_from(["}}", "-}}"])).map(" ".join)
_PIECES = st.recursive(
    st.one_of(_TEXT, _PRINTED),
    lambda inner: st.one_of(_statement(inner), st.lists(inner, min_size=1, max_size=3).map("".join)),
    max_leaves=6,
)


def templates(chats: list[str]) -> st.SearchStrategy[tuple[str, str]]:
    """A template, and the name of a chat."""
    return st.tuples(st.lists(_PIECES, min_size=1, max_size=4).map("".join), st.sampled_from(chats))
