"""The variables that a template wants from outside: those that it reads where it has not set them before."""

from collections.abc import Iterable

from jinja2 import nodes

_OF_MACROS = {"caller", "varargs", "kwargs"}
_INNER = (nodes.Block, nodes.FilterBlock, nodes.Scope)  # what is set in them is unknown behind them


def template_variables(template: nodes.Template) -> set[str]:
    return _read(template, {macro.name for macro in template.find_all(nodes.Macro)})


def _read(node: nodes.Node, known: set[str]) -> set[str]:
    """`known` gets the names that the node sets for what follows it; of several branches, those that each sets."""
    match node:
        case nodes.Name(ctx="load"):
            return {node.name} - known
        case nodes.Name():
            known.add(node.name)
            return set()
        case nodes.Assign():
            return _read(node.node, known) | _read(node.target, known)
        case nodes.AssignBlock():
            body = _of_all([node.filter, *node.body], set(known))
            return body | _read(node.target, known)
        case nodes.If():
            found, branches = _read(node.test, known), [set(known) for _ in range(len(node.elif_) + 2)]
            for branch, inner in zip((node.body, *([each] for each in node.elif_), node.else_), branches, strict=True):
                found |= _of_all(branch, inner)
            known |= set.intersection(*branches)
            return found
        case nodes.For():
            inner = {*known, "loop"}
            found = _read(node.iter, known) | _read(node.target, inner)
            return found | _of_all([node.test, *node.body], inner) | _of_all(node.else_, set(known))
        case nodes.Macro():
            return _of_all(node.defaults, known) | _of_all([*node.args, *node.body], known | _OF_MACROS)
        case nodes.CallBlock():
            return _read(node.call, known) | _of_all([*node.defaults, *node.args, *node.body], known | _OF_MACROS)
        case nodes.With():
            return _of_all(node.values, known) | _of_all([*node.targets, *node.body], set(known))
        case nodes.Import():
            known.add(node.target)
        case nodes.FromImport():
            known |= {name if isinstance(name, str) else name[1] for name in node.names}
    return _of_all(node.iter_child_nodes(), set(known) if isinstance(node, _INNER) else known)


def _of_all(each: Iterable[nodes.Node | None], known: set[str]) -> set[str]:
    """In the order in which they are read."""
    return set().union(*(_read(node, known) for node in each if node is not None))
