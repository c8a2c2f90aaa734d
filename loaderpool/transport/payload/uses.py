"""Whether code does nothing with a variable but read single elements of it, told from its bytecode.

Where that is so, another object with the same elements does as well as the list or dict itself: a packed one. Where it
cannot be told (the variable is passed on, returned, iterated, written to; or an index holds a condition), the answer is
the place of that use. So unknown instructions, of Pythons to come as well, mean that the list stays as it is.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Scope = Literal["global", "closure", "parameter", "attribute"]

_LOADS: dict[Scope, frozenset[str]] = {
    "global": frozenset({"LOAD_GLOBAL", "LOAD_NAME"}),
    "closure": frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}),
    "parameter": frozenset(
        {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "LOAD_DEREF"}
    ),
    "attribute": frozenset({"LOAD_ATTR"}),  # LOAD_METHOD calls what it loads: that is no list
}
# They give the variable another value, or none: the packed one is not written to.
_REBINDS = frozenset(
    {"STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_FAST", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_NAME",
     "DELETE_DEREF", "DELETE_FAST", "DELETE_ATTR", "LOAD_CLOSURE", "MAKE_CELL", "COPY_FREE_VARS", "LOAD_CONST",
     "IMPORT_NAME", "IMPORT_FROM", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"}
)  # fmt: skip
_SILENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "KW_NAMES", "RESUME", "NOT_TAKEN"})
_PUSHES_ONE = frozenset(
    {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_CONST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_NAME", "LOAD_CLOSURE",
     "PUSH_NULL"}
)  # fmt: skip
_TAKES_ONE = frozenset({"TO_BOOL", "FORMAT_SIMPLE", "CONVERT_VALUE", "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE"})
_TAKES_TWO = frozenset({"COMPARE_OP", "CONTAINS_OP", "IS_OP", "FORMAT_WITH_SPEC"})
_BUILDS = frozenset({"BUILD_TUPLE", "BUILD_LIST", "BUILD_STRING", "BUILD_SLICE"})
_CALLS = {"CALL_FUNCTION": 1, "CALL_METHOD": 2, "CALL_FUNCTION_KW": 2, "CALL": 2, "CALL_KW": 3}  # beside arguments
# What asks for an object's truth; all that are empty, or that are not, answer alike.
_TRUTH = ("TO_BOOL", "UNARY_NOT", "POP_JUMP_IF", "POP_JUMP_FORWARD_IF", "POP_JUMP_BACKWARD_IF")


def other_use(
    code: types.CodeType, name: str, scope: Scope, namespace: Mapping[str, Any], *, is_mapping: bool
) -> tuple[str, int] | None:
    """Return the first use of a variable that is more than reading elements: name of the function, and line; or None.

    Elements are read by `x[i]`, for a sequence also by `x[a:b]`, for a mapping also by `key in x` and `x.get`. Harmless
    are `len(x)`, its truth, and `x is y`, too; and so is giving the variable another value.

    Args:
        code: of a function. Functions within it are looked through as well.
        name: the variable's, or the attribute's, of whatever object.
        scope: how the code comes to it.
        namespace: the function's globals.
        is_mapping: a dict is looked for, not a list or tuple.
    """
    line = code.co_firstlineno
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _SILENT]
    is_cell = name in code.co_cellvars or name in code.co_freevars
    lengths = _calls_of_len(instructions) if namespace.get("len", len) is len else set()
    for at, instruction in enumerate(instructions):
        line = _line_of(instruction) or line
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if name not in names or instruction.opname in _REBINDS or instruction.opcode in dis.hasconst:
            continue
        if instruction.opname not in _LOADS[scope]:
            if scope in ("parameter", "closure") and instruction.opcode in dis.haslocal and not is_cell:
                return code.co_name, line
            continue
        if is_cell and instruction.opcode in dis.haslocal:  # the cell, for a function within
            continue
        if scope == "attribute" and _is_method_call(instruction):
            continue
        above = 1 if instruction.argrepr.endswith("+ NULL") else 0
        if instruction.opname == "LOAD_FAST_LOAD_FAST" and names[0] == name:
            above = 1
        if names == (name, name) or not _is_harmless(instructions, at, above, lengths, is_mapping):
            return code.co_name, line
    inner_scope: Scope = "closure" if scope == "parameter" else scope
    for inner in code.co_consts:
        if not isinstance(inner, types.CodeType) or (inner_scope == "closure" and name not in inner.co_freevars):
            continue
        found = other_use(inner, name, inner_scope, namespace, is_mapping=is_mapping)
        if found is not None:
            return found
    return None


def codes_within(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_within(constant)


def _is_harmless(instructions: list[dis.Instruction], at: int, above: int, lengths: set[int], is_mapping: bool) -> bool:
    consumer, above = _consumer(instructions, at, above)
    if consumer is None:
        return False
    name = consumer.opname
    if name == "BINARY_SUBSCR" or (name == "BINARY_OP" and consumer.argrepr == "[]"):
        return above == 1
    if name == "BINARY_SLICE":
        return above == 2 and not is_mapping
    if name == "CONTAINS_OP":
        return above == 0 and is_mapping
    if name in ("LOAD_METHOD", "LOAD_ATTR"):
        return is_mapping and consumer.argval == "get" and _is_method_call(consumer)
    if name == "IS_OP" or name.startswith(_TRUTH):
        return True
    return consumer.offset in lengths


def _calls_of_len(instructions: list[dis.Instruction]) -> set[int]:
    """Return the offsets of the calls of `len` with one argument."""
    found = set()
    for at, instruction in enumerate(instructions):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "len":
            consumer, _ = _consumer(instructions, at, (_pushed(instruction) or 1) - 1)
            if consumer is not None and consumer.opname in ("CALL", "CALL_FUNCTION") and consumer.arg == 1:
                found.add(consumer.offset)
    return found


def _consumer(instructions: list[dis.Instruction], at: int, above: int) -> tuple[dis.Instruction | None, int]:
    """What takes from the stack the value that an instruction has put there, and how many values lie above it then."""
    for instruction in instructions[at + 1 :]:
        taken, pushed = _taken(instruction), _pushed(instruction)
        if taken is None or pushed is None:
            return None, 0
        if taken > above:
            return instruction, above
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return None, 0
        above += pushed - taken
    return None, 0


def _taken(instruction: dis.Instruction) -> int | None:
    """Return how many values it takes from the stack; None where that is not known here."""
    name, count = instruction.opname, instruction.arg or 0
    if name in _PUSHES_ONE or name in ("LOAD_GLOBAL", "LOAD_FAST_LOAD_FAST"):
        return 0
    if name == "STORE_FAST_LOAD_FAST":
        return 1
    if name in _TAKES_TWO or name.startswith(("BINARY_", "INPLACE_")):
        return 3 if name == "BINARY_SLICE" else 2
    if name in ("LOAD_ATTR", "LOAD_METHOD") or name in _TAKES_ONE or name.startswith(("UNARY_", *_TRUTH)):
        return 1
    if name == "FORMAT_VALUE":
        return 2 if count & 4 else 1
    if name in _BUILDS:
        return count
    return _CALLS[name] + count if name in _CALLS else None


def _pushed(instruction: dis.Instruction) -> int | None:
    name = instruction.opname
    if name == "LOAD_GLOBAL":
        return 2 if "NULL" in instruction.argrepr else 1
    if name == "LOAD_ATTR":
        return 2 if _is_method_call(instruction) else 1
    if name in ("LOAD_METHOD", "LOAD_FAST_LOAD_FAST"):
        return 2
    if name.startswith("POP_JUMP"):
        return 0
    return None if _taken(instruction) is None else 1


def _is_method_call(instruction: dis.Instruction) -> bool:
    """Whether an attribute is loaded only to be called."""
    return instruction.opname == "LOAD_METHOD" or "NULL" in instruction.argrepr


def _line_of(instruction: dis.Instruction) -> int | None:
    positions = getattr(instruction, "positions", None)
    if positions is not None and positions.lineno is not None:
        return int(positions.lineno)
    starts = instruction.starts_line
    return starts if isinstance(starts, int) and not isinstance(starts, bool) else None
