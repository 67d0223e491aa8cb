"""What an expression of PromQL asks for: families, labels, and how it treats them."""

import re
from dataclasses import dataclass, field

import promql_parser as promql

RANGE, NAME = "5m", "chosen_by_a_variable"
_VARIABLE = re.compile(r"\$\{(\w+)(?:[.:][^}]*)?\}|\[\[(\w+)(?::\w+)?\]\]|\$(\w+)")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`')
_OF_TIME = re.compile(r"interval|range|window|period|step|duration|resolution|offset", re.IGNORECASE)
COUNTED = ("rate", "irate", "increase")
MAKERS = ("label_replace", "label_join")  # of labels


@dataclass(frozen=True, slots=True)
class Matcher:
    label: str
    value: str
    is_equal: bool  # `=`; the others are patterns or exclude
    is_chosen: bool  # by a variable of the dashboard


@dataclass(slots=True)
class Selector:
    """One family, or a pattern of names, that an expression asks for."""

    name: str  # "" where only a pattern of names is given
    pattern: str = ""
    matchers: list[Matcher] = field(default_factory=list)
    grouped_by: set[str] = field(default_factory=set)  # labels that aggregations around it keep or join by
    is_counted: bool = False  # within rate() or increase()
    others: list["Selector"] = field(default_factory=list)  # of the other side of an `or`: one of both is enough


@dataclass(slots=True)
class Asked:
    selectors: list[Selector] = field(default_factory=list)
    quantiles_without_le: list[str] = field(default_factory=list)  # families of such a histogram_quantile


def asked_by(expr: str) -> Asked:
    """What an expression asks for. Raises ValueError where it cannot be read as PromQL."""
    try:
        tree = promql.parse(fill(expr))
    except ValueError:
        tree = promql.parse(fill(expr, "1"))  # a variable stands where a number must
    found = Asked()
    _visit(tree, found, frozenset(), frozenset(_made_labels(tree)), False)
    return found


def fill(expr: str, chosen: str = NAME) -> str:
    """The expression with Grafana's variables replaced by what PromQL can read. Within quotes they stay."""
    parts, at = [], 0
    for quoted in _QUOTED.finditer(expr):
        parts += [_fill_plain(expr[at : quoted.start()], chosen), quoted[0]]
        at = quoted.end()
    return "".join([*parts, _fill_plain(expr[at:], chosen)])


def _fill_plain(text: str, chosen: str) -> str:
    def replacement(found: re.Match) -> str:
        before, after = text[: found.start()].rstrip(), text[found.end() :].lstrip()
        name = found[1] or found[2] or found[3]
        if before[-1:] in ("[", ":") or before.endswith("offset") or before.endswith("offset -"):
            return RANGE
        if name.startswith("__") and name.endswith(("_s", "_ms")):
            return "300"
        if _OF_TIME.search(name) and after[:1] != "{" and not after.startswith("("):
            return RANGE if after[:1] in ("]", ":") else "300"
        return "sum" if after.startswith("(") and before[-1:] not in (",", ")") else chosen

    return _VARIABLE.sub(replacement, text)


def _made_labels(tree: promql.Expr) -> set[str]:
    """Labels that the expression itself makes."""
    made: set[str] = set()

    def see(node: promql.Expr) -> None:
        if isinstance(node, promql.Call) and node.func.name in MAKERS and len(node.args) > 1:
            target = node.args[1]
            if isinstance(target, promql.StringLiteral):
                made.add(target.val)
        elif isinstance(node, promql.AggregateExpr) and isinstance(node.param, promql.StringLiteral):
            made.add(node.param.val)  # of count_values

    promql.walk(tree, see)
    return made


def _visit(node: promql.Expr, found: Asked, grouped: frozenset[str], made: frozenset[str], counted: bool) -> None:
    match node:
        case promql.VectorSelector():
            found.selectors.append(_selector(node, grouped - made, counted))
        case promql.MatrixSelector():
            _visit(node.vector_selector, found, grouped, made, counted)
        case promql.Call():
            if node.func.name == "histogram_quantile" and len(node.args) > 1:
                found.quantiles_without_le += _without_le(node.args[1])
            for each in node.args:
                _visit(each, found, grouped, made, node.func.name in COUNTED)
        case promql.AggregateExpr():
            kept = set(node.modifier.labels) if node.modifier is not None and _is_by(node.modifier) else set()
            _visit(node.expr, found, grouped | kept, made, counted)
        case promql.BinaryExpr():
            sides: list[list[Selector]] = []
            for each in (node.lhs, node.rhs):
                before = len(found.selectors)
                _visit(each, found, grouped, made, counted)
                sides.append(found.selectors[before:])
            if str(node.op) == "or":
                for mine, theirs in (sides, reversed(sides)):
                    for selector in mine:
                        selector.others += theirs
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            _visit(node.expr, found, grouped, made, counted)


def _is_by(modifier: promql.AggModifier) -> bool:
    return modifier.type == promql.AggModifierType.By


def _selector(node: promql.VectorSelector, grouped: frozenset[str], counted: bool) -> Selector:
    selector = Selector(node.name or "", grouped_by={label for label in grouped if label != NAME}, is_counted=counted)
    for each in node.matchers.matchers:
        if each.name == "__name__":
            if each.op == promql.MatchOp.Equal:
                selector.name = each.value
            elif each.op == promql.MatchOp.Re:
                selector.pattern = each.value
            continue
        is_chosen = bool(_VARIABLE.search(each.value))
        selector.matchers.append(Matcher(each.name, each.value, each.op == promql.MatchOp.Equal, is_chosen))
    return selector


def _without_le(node: promql.Expr) -> list[str]:
    """The families of an aggregation that drops `le`, of which no quantile can be made."""
    while isinstance(node, promql.ParenExpr):
        node = node.expr
    if not isinstance(node, promql.AggregateExpr):
        return []
    modifier = node.modifier
    labels = set(modifier.labels) if modifier is not None else set()
    keeps = ("le" in labels) == _is_by(modifier) if modifier is not None else False
    inner = Asked()
    _visit(node, inner, frozenset(), frozenset(), False)
    return [] if keeps else [each.name for each in inner.selectors if each.name.endswith("_bucket")]
