"""Generate mutants of a source file from its syntax tree. Each has one small change, inside one function.

Nothing here runs a mutant. Its `code` takes the place of the code of the function that was changed, so no module has to
be loaded again.
"""

import ast
import dis
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

DURABLE_CALLS = {"remember"}  # methods that ask for a durable write
DURABLE_EFFECTS = {"Remember", "Append"}  # effects that ask for one, where they are appended to a list
OTHER_BOUND: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
NEUTRAL = {"bool": "False", "int": "0", "float": "0.0", "str": "''", "list": "[]", "dict": "{}", "set": "set()"}
KINDS = ("negate", "durable write", "return")
FINER_KINDS = ("compare", "call")  # a bound moved by one and a call left out: more of them are equivalent

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Slot:
    """Name a slot of a syntax tree: a field of a node, or one entry of a field that is a list."""

    holder: ast.AST
    field: str
    index: int | None = None

    def swap(self, new: Any) -> Any:
        """Put something there, and return what it replaces."""
        if self.index is None:
            old = getattr(self.holder, self.field)
            setattr(self.holder, self.field, new)
        else:
            entries = getattr(self.holder, self.field)
            old, entries[self.index] = entries[self.index], new
        return old


@dataclass(frozen=True)
class Mutation:
    """Describe one change of a function, which is not compiled yet."""

    source: "Source"
    function: str  # its qualified name
    first_line: int  # of the function, decorators included
    kind: str
    line: int
    change: str
    slot: Slot
    new: Any  # what comes into that slot


@dataclass(frozen=True)
class Mutant:
    """Hold one change, and the changed function's code."""

    file: str
    line: int
    function: str
    kind: str
    change: str
    source_line: str
    code: CodeType


class Source:
    """Hold a file as a syntax tree, and generate its mutations."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name, self.text = path, name, path.read_text()
        self.tree = ast.parse(self.text)
        self._original = self._compiled()

    def mutations(self) -> Iterator[Mutation]:
        """Yield every mutation, in the order of the lines."""
        for name, function in _functions(self.tree, ""):
            first = min(node.lineno for node in (function, *function.decorator_list))
            for change in sorted(_changes(function), key=lambda change: change[1]):
                yield Mutation(self, name, first, *change)

    def mutant(self, mutation: Mutation) -> Mutant | None:
        """Compile a mutation; None if it does not change the bytecode, or if no other code can take its place."""
        old = mutation.slot.swap(mutation.new)
        try:
            code = _code_of(self._compiled(), mutation)
        finally:
            mutation.slot.swap(old)
        before = _code_of(self._original, mutation)
        if code.co_freevars != before.co_freevars or fingerprint(code) == fingerprint(before):
            return None
        line = self.text.splitlines()[mutation.line - 1].strip()
        return Mutant(self.name, mutation.line, mutation.function, mutation.kind, mutation.change, line, code)

    def _compiled(self) -> CodeType:
        return compile(self.tree, str(self.path), "exec", dont_inherit=True)


def draw(mutations: Iterable[Mutation], count: int, seed: int) -> list[Mutant]:
    """Draw mutants by a seed, none of them equivalent to the original or to another one by its bytecode."""
    order = list(mutations)
    random.Random(seed).shuffle(order)
    drawn: dict[object, Mutant] = {}
    for mutation in order:
        if len(drawn) == count:
            break
        if (mutant := mutation.source.mutant(mutation)) is not None:
            drawn.setdefault((mutant.file, mutant.function, fingerprint(mutant.code)), mutant)
    return list(drawn.values())


def fingerprint(code: CodeType) -> object:
    """Return what two pieces of code have in common if their instructions are the same, whatever their lines are."""
    steps = ((step.opname, step.argval) for step in dis.get_instructions(code))
    known = [(name, fingerprint(value) if isinstance(value, CodeType) else repr(value)) for name, value in steps]
    return tuple(known), code.co_exceptiontable, code.co_flags


def _code_of(code: CodeType, mutation: Mutation) -> CodeType:
    """Return the code of the mutation's function, which lies somewhere in that of its module."""
    waiting = [code]
    while waiting:
        one = waiting.pop()
        if (one.co_qualname, one.co_firstlineno) == (mutation.function, mutation.first_line):
            return one
        waiting += [each for each in one.co_consts if isinstance(each, CodeType)]
    raise LookupError(f"{mutation.source.path} has no code of {mutation.function}")


def _functions(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, Function]]:
    """Yield functions and methods by their qualified names; what is nested in a function belongs to it."""
    for child in node.body:
        if isinstance(child, Function):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


Change = tuple[str, int, str, Slot, Any]  # as in a Mutation: kind, line, change, slot, new


def _changes(function: Function) -> Iterator[Change]:
    """Yield the changes of one function's body."""
    yield from _early_return(function)
    for index, statement in enumerate(function.body):
        yield from _changes_at(Slot(function, "body", index), statement)


def _changes_at(slot: Slot, node: ast.AST, *, tested: bool = False, negated: bool = False) -> Iterator[Change]:
    """Yield the changes of a node and of all below it.

    `tested`: only its truth matters, so that it can be negated; but not once more where it is `negated` already.
    """
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield _replaced("durable write" if _is_durable(node.value) else "call", slot, node, ast.Pass())
    if isinstance(node, ast.expr) and (tested or _is_boolean(node)) and not negated:
        yield _replaced("negate", slot, node, _negation(node))
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            if other := OTHER_BOUND.get(type(operator)):
                ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
                yield _replaced("compare", slot, node, ast.Compare(node.left, ops, node.comparators))
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    for field, value in ast.iter_fields(node):
        truth = field in ("test", "ifs", "guard") or is_not or (tested and isinstance(node, ast.BoolOp))
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not isinstance(node, ast.Assert):
                spot = Slot(node, field, index if isinstance(value, list) else None)
                yield from _changes_at(spot, child, tested=truth, negated=is_not)


def _replaced(kind: str, slot: Slot, node: ast.expr | ast.stmt, new: ast.expr | ast.stmt) -> Change:
    if not hasattr(new, "lineno"):  # what stood below the node has its line
        ast.fix_missing_locations(ast.copy_location(new, node))
    return kind, node.lineno, f"{ast.unparse(node)} -> {ast.unparse(new)}", slot, new


def _is_boolean(node: ast.expr) -> bool:
    """Return whether an expression is a truth value by its form; `a or b` is one if `a` or `b` is."""
    if isinstance(node, ast.BoolOp):
        return any(map(_is_boolean, node.values))
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _negation(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    return ast.UnaryOp(ast.Not(), node)


def _is_durable(call: ast.Call) -> bool:
    """Return whether a call asks for a durable write: `….remember()`, or `….append(msg.Append(…))`."""
    name = _called(call)
    effects = [_called(argument) for argument in call.args if isinstance(argument, ast.Call)]
    return name in DURABLE_CALLS or (name == "append" and bool(DURABLE_EFFECTS.intersection(effects)))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _early_return(function: Function) -> Iterator[Change]:
    """Yield the change that replaces the body of a function that has effects by the neutral value of its type."""
    neutral = _neutral(function.returns)
    if neutral is None or function.name.startswith("__") or not _has_effects(function):
        return
    body = ast.parse(f"def f(): return {neutral}").body[0]
    assert isinstance(body, ast.FunctionDef)
    new = ast.copy_location(body.body[0], function.body[0])
    for node in ast.walk(new):
        ast.copy_location(node, function.body[0])
    yield "return", function.lineno, f"{function.name}(…) -> return {neutral}", Slot(function, "body"), [new]


def _neutral(returns: ast.expr | None) -> str | None:
    """Return the neutral value of an annotated type, as source; None for a type that has none."""
    text = "None" if returns is None else ast.unparse(returns)
    if "None" in text.split(" | "):
        return "None"
    if text.startswith("tuple[") and text.endswith(", ...]"):
        return "()"
    return NEUTRAL.get(text.partition("[")[0])


def _has_effects(function: Function) -> bool:
    """Return whether a function calls something for its effect, or changes an attribute or an entry."""
    return any(
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or (isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load))
        for node in ast.walk(function)
    )
