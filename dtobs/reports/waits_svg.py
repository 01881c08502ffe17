"""Who waits for whom: boxes of ranks that do the same, arrows to those they wait for, the cause at the right."""

from __future__ import annotations

import textwrap
from html import escape

from dtobs.diagnose.pictures import WaitNode, WaitPicture
from dtobs.words import ranks_text

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 280, 96, 64, 22
_CHARACTERS, _SITE_CHARACTERS = 42, 38


def render(picture: WaitPicture) -> str:
    """An SVG element; its texts can be selected and searched."""
    reach = _reach(picture)
    layer = _layers(picture, reach)
    columns = max(layer.values(), default=0) + 1
    place: dict[int, tuple[int, int]] = {}
    for column in range(columns):
        nodes = [index for index in layer if layer[index] == column]
        for row, index in enumerate(sorted(nodes)):
            place[index] = ((columns - 1 - column) * (_WIDTH + _GAP_X), row * (_HEIGHT + _GAP_Y))
    # Room for the arrows that go round within a column.
    width = columns * (_WIDTH + _GAP_X) - _GAP_X + 60
    height = max((y for _, y in place.values()), default=0) + _HEIGHT
    parts = [_edge(place[source], place[target], source) for source, target in _needed(picture, reach)]
    parts += [_node(node, *place[index]) for index, node in enumerate(picture.nodes)]
    return (
        f'<div class="wide end"><svg viewBox="-2 -2 {width + 4} {height + 4}" width="{width}" height="{height}" '
        f'role="img" aria-label="who waits for whom">{"".join(parts)}</svg></div>'
    )


def _reach(picture: WaitPicture) -> list[set[int]]:
    """By node: those it waits for, also through others."""
    reach: list[set[int]] = [set() for _ in picture.nodes]
    for source, target in picture.edges:
        reach[source].add(target)
    for via in range(len(reach)):
        for others in reach:
            if via in others:
                others |= reach[via]
    return reach


def _layers(picture: WaitPicture, reach: list[set[int]]) -> dict[int, int]:
    """By node: how many arrows at most to who waits for nobody, or to a circle; a circle is in one layer."""
    layer = dict.fromkeys(range(len(reach)), 0)
    for _ in reach:
        for source, target in picture.edges:
            if source not in reach[target]:
                layer[source] = max(layer[source], layer[target] + 1)
            else:
                layer[source] = layer[target] = max(layer[source], layer[target])
    return layer


def _needed(picture: WaitPicture, reach: list[set[int]]) -> list[tuple[int, int]]:
    """The arrows that the others do not imply: who waits for a rank that waits for a third waits for that one, too."""
    return [
        (source, target)
        for source, target in picture.edges
        if not any(
            target in reach[via] and source not in reach[via] and via not in reach[target]
            for via in reach[source] - {source, target}
        )
    ]


def _node(node: WaitNode, x: int, y: int) -> str:
    kind = "node accused" if node.accused else "node"
    waits = "waits in " if len(node.ranks) == 1 else "wait in "
    said = textwrap.wrap(f"{waits if node.waits else ''}{node.text}", _CHARACTERS)
    lines = [ranks_text(node.ranks, 4), *said[:3]]
    if len(said) > 3:
        lines[-1] = f"{lines[-1][: _CHARACTERS - 1]}…"
    text = "".join(
        f'<text x="{x + 10}" y="{y + 20 + 17 * number}"{" class=name" if not number else ""}>{escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    site = node.site if len(node.site) <= _SITE_CHARACTERS else f"…{node.site[-_SITE_CHARACTERS + 1 :]}"
    text += f'<text class="site" x="{x + 10}" y="{y + _HEIGHT - 8}">{escape(site)}</text>'
    return f'<g class="{kind}"><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>{text}</g>'


def _edge(source: tuple[int, int], target: tuple[int, int], number: int) -> str:
    """An arrow from a box to another; several into one box end at places of their own."""
    shift = 10 * (number % 5) - 20
    (x0, y0), (x1, y1) = source, target
    y0, y1 = y0 + _HEIGHT // 2, y1 + _HEIGHT // 2 + shift
    if x0 < x1:
        start, end, bend = x0 + _WIDTH, x1, (x1 - x0 - _WIDTH) // 2
        curve = f"M{start} {y0}C{start + bend} {y0} {end - bend} {y1} {end - 6} {y1}"
        return f'<path class="edge" d="{curve}"/><path class="head" d="M{end} {y1}l-9 -5v10z"/>'
    start, end = x0 + _WIDTH, x1 + _WIDTH
    out = max(start, end) + 40
    curve = f"M{start} {y0 + shift}C{out} {y0 + shift} {out} {y1} {end + 6} {y1}"
    return f'<path class="edge" d="{curve}"/><path class="head" d="M{end} {y1}l9 -5v10z"/>'
