"""The loops of a Python function, from its bytecode: which lines run again and again around an instruction.

A loop is the natural loop of a jump back: what leads to that jump without passing the place that it jumps to (Aho, Lam,
Sethi and Ullman, Compilers, 9.6). The compiler puts the end of a loop behind what follows it where that saves a jump.
"""

from __future__ import annotations

import dis
from collections import defaultdict
from functools import lru_cache
from types import CodeType

_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_ENDS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RETURN_", "RAISE_", "RERAISE")
"""What the next instruction does not follow upon."""


@lru_cache(256)
def loops_around(code: CodeType, at: int) -> tuple[tuple[int, int], ...]:
    """First and last line of each loop of `code` that instruction `at` (an offset) is in, the innermost first."""
    instructions = list(dis.get_instructions(code))
    here = max((each.offset for each in instructions if each.offset <= at), default=0)  # `at` may lie in its cache
    leads_to: dict[int, list[int]] = defaultdict(list)
    jumps_back: dict[int, list[int]] = defaultdict(list)  # by where to, which is where a loop begins
    for this, following in zip(instructions, [*instructions[1:], None], strict=True):
        if this.opcode in _JUMPS:
            leads_to[this.argval].append(this.offset)
            if this.argval <= this.offset and "NO_INTERRUPT" not in this.opname:  # that one is how an await waits
                jumps_back[this.argval].append(this.offset)
        if following is not None and not this.opname.startswith(_ENDS):
            leads_to[following.offset].append(this.offset)
    loops = [_body(begin, jumps, leads_to) for begin, jumps in jumps_back.items()]
    lines = {each.offset: line for each in instructions if each.positions and (line := each.positions.lineno)}
    around = [[lines[offset] for offset in loop if offset in lines] for loop in sorted(loops, key=len) if here in loop]
    return tuple(dict.fromkeys((min(numbers), max(numbers)) for numbers in around if numbers))


def _body(begin: int, jumps: list[int], leads_to: dict[int, list[int]]) -> set[int]:
    """Offsets of the instructions of the loop that begins at `begin` and jumps back there from each of `jumps`."""
    found, left = {begin}, list(jumps)
    while left:
        offset = left.pop()
        if offset not in found:
            found.add(offset)
            left += leads_to[offset]
    return found
