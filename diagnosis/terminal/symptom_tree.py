"""The tree of one symptom on the terminal, and below it the finding and the measurement to make next."""

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from sojourn.diagnosis.symptom_tree.tree import STATUS_WORDS, LifecycleBranch, ObjectBranch, SymptomTree
from sojourn.diagnosis.terminal.time_spent import bar, labelled_grid, section
from sojourn.diagnosis.verdict import Diagnosis, label_fix
from sojourn.metrics.ledger import COLOURS

MARKS = {
    "leads_here": ("●", "bold yellow"),
    "possible": ("◐", "cyan"),
    "unknown": ("?", "dim"),
    "ruled_out": ("○", "dim"),
}
SYMPTOM_MARKS = {"present": ("this run shows it", "bold yellow"), "absent": ("this run does not show it", "green"),
                 "unknown": ("this run alone cannot tell", "dim")}  # fmt: skip
BAR_CELLS = 16
MOST_FIGURES = 3
LISTED_RULED_OUT = 3  # of the objects below an open lifecycle, in full; the others by name


def render_tree(tree: SymptomTree, diagnosis: Diagnosis) -> RenderableType:
    """Readable in 100 columns. All text of the run is shown as it is, never read as markup."""
    word, style = SYMPTOM_MARKS[tree.status]
    root = Tree(Text.assemble((f"“{tree.words}”", "bold"), "  ", (word, style), f": {tree.reason}"))
    for branch in tree.branches:
        _add_lifecycle(root, branch)
    legend = Text("   ").join(
        Text.assemble((mark, style), f" {STATUS_WORDS[key]}") for key, (mark, style) in MARKS.items()
    )
    note = Text(f"Shares are of {tree.basis}.", style="dim")
    return Group(root, Text(""), legend, note, *_conclusion(tree, diagnosis))


def _add_lifecycle(root: Tree, branch: LifecycleBranch) -> None:
    mark, style = MARKS[branch.status]
    colour = COLOURS[branch.lifecycle] if branch.status != "ruled_out" else "bright_black"
    head = Text.assemble((f"{mark} ", style), (f"{branch.lifecycle:<8}", f"bold {colour}"))
    if branch.share is not None:
        head.append(f"{branch.share:>5.0%} ").append(bar(branch.share, colour, BAR_CELLS)).append(" ")
    head.append(STATUS_WORDS[branch.status], style)
    node = root.add(head)
    node.add(Text(branch.reason, style="dim" if branch.status == "ruled_out" else ""))
    if branch.status == "ruled_out":
        return
    node.add(Text(branch.asks, style="italic dim"))
    ruled_out = [each for each in branch.objects if each.status == "ruled_out"]
    for each in branch.objects:
        if each.status != "ruled_out":
            _add_object(node, each)
    for each in ruled_out[:LISTED_RULED_OUT]:
        node.add(Text(f"○ {each.name}: {each.reason}", style="dim"))
    if rest := [each.name for each in ruled_out[LISTED_RULED_OUT:]]:
        node.add(Text(f"○ ruled out as well: {', '.join(rest)}", style="dim"))


def _add_object(node: Tree, each: ObjectBranch) -> None:
    mark, style = MARKS[each.status]
    head = Text.assemble((f"{mark} ", style), (each.name, "bold"), (f"  {STATUS_WORDS[each.status]}", style))
    if each.status == "unknown":
        node.add(head.append(f" ({each.reason})", "dim"))
        return
    leaf = node.add(head)
    facts = [each.reason] if each.finding is not None else []
    facts += [figure.statement for figure in each.figures if figure.statement not in facts]
    for fact in facts[:MOST_FIGURES]:
        leaf.add(Text(fact))
    leaf.add(Text.assemble(("measure: ", "dim"), each.measurement))


def _conclusion(tree: SymptomTree, diagnosis: Diagnosis) -> list[RenderableType]:
    grid = labelled_grid()
    if tree.finding is not None:
        found = diagnosis.findings[tree.finding]
        grid.add_row(
            "finding", Text(f"{tree.finding + 1} · {' → '.join(found.lifecycles)} · {found.object} · {found.kind}")
        )
        grid.add_row("cause", Text(found.cause, style="bold"))
        grid.add_row(label_fix(found.fix), Text(f"{found.fix.change} ({found.fix.gain})"))
    elif tree.status == "absent":
        grid.add_row("finding", Text("none: this run does not show the symptom"))
    else:
        grid.add_row("finding", Text("none: no known cause explains this symptom in this run"))
    if tree.next_measurement:
        grid.add_row("measure next", Text(tree.next_measurement))
    if tree.next_command:
        grid.add_row("", Text(f"$ {tree.next_command}", style="bold"))
    return [section("Where it leads"), grid]
