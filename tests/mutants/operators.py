"""The rules by which a line is changed, as in the mutation testing tools mutmut and cosmic-ray."""

import ast
import copy
import itertools
from collections.abc import Iterator

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
NOTES = {"log", "logger", "logging", "warnings"}
"""Names whose calls only tell a reader something: they are not deleted."""


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """The changes of one expression or statement: the rule's name and the new node, or None for a deleted statement."""
    for rule in (compared, computed, joined, bare_condition, constant, called, sliced, statement):
        yield from rule(node)


def compared(node: ast.AST):
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if type(operator) in COMPARED:
                changed = copy.deepcopy(node)
                changed.ops[place] = COMPARED[type(operator)]()
                yield "compare", changed


def computed(node: ast.AST):
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in COMPUTED and not is_text(node):
        changed = copy.deepcopy(node)
        changed.op = COMPUTED[type(node.op)]()
        yield "compute", changed


def is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )


def joined(node: ast.AST):
    if isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and-or", changed
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "drop not", node.operand


def bare_condition(node: ast.AST):
    """`if x` and `x if y else z` whose condition has no operator that another rule changes."""
    if isinstance(node, ast.If | ast.IfExp | ast.While) and isinstance(
        node.test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr
    ):
        changed = copy.deepcopy(node)
        changed.test = ast.copy_location(ast.UnaryOp(ast.Not(), changed.test), node.test)
        yield "negate", changed


def constant(node: ast.AST):
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "flip", ast.Constant(not node.value)
        elif isinstance(node.value, int | float):
            yield "add one", ast.Constant(node.value + 1)


def called(node: ast.AST):
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in SWAPPED_CALLS:
        changed = copy.deepcopy(node)
        changed.func.id = SWAPPED_CALLS[node.func.id]
        yield "min-max", changed
    if isinstance(node.func, ast.Name) and node.func.id in ("sorted", "reversed") and len(node.args) == 1:
        yield "keep order", ast.Call(ast.Name("list", ast.Load()), node.args, [])
    if owner(node.func) in SWAPPED_CALLS:
        return
    plain = [place for place, one in enumerate(node.args) if isinstance(one, ast.Name | ast.Attribute)]
    for first, second in itertools.pairwise(plain):
        if second == first + 1:
            changed = copy.deepcopy(node)
            changed.args[first], changed.args[second] = changed.args[second], changed.args[first]
            yield "swap arguments", changed
    for place, word in enumerate(node.keywords):
        if word.arg:
            changed = copy.deepcopy(node)
            del changed.keywords[place]
            yield "drop argument", changed


def sliced(node: ast.AST):
    if isinstance(node, ast.Slice):
        for end in ("lower", "upper"):
            if getattr(node, end):
                changed = copy.copy(node)
                setattr(changed, end, None)
                yield "open slice", changed


def statement(node: ast.AST):
    if isinstance(node, ast.Continue):
        yield "break", ast.Break()
    if isinstance(node, ast.Break):
        yield "continue", ast.Continue()
    if isinstance(node, ast.Return) and node.value and not is_none(node.value):
        yield "return none", ast.Return(ast.Constant(None))
    if isinstance(node, ast.Raise | ast.Delete) or is_deed(node):
        yield "delete", None


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def is_deed(node: ast.AST) -> bool:
    """A call for its effect, or an assignment that outlives the function."""
    if isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        return isinstance(call, ast.Call) and owner(call.func) not in NOTES
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)


def owner(node: ast.AST) -> str:
    """The first name of a dotted one: `log` of `log.info`."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
