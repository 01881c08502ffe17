"""The look and the frame of an HTML page: light and dark by what the reader's system prefers, readable on paper."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from dtobs.reports.sanitize import printable

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --panel: #f6f7f9; --line: #8886;
  --critical: #c62828; --warning: #9a5b00; --note: #0b5cad; --good: #2e7d32; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e3e6ea; --panel: #1f242a; --line: #8a94a088;
  --critical: #ff7b72; --warning: #e3b341; --note: #79b8ff; --good: #56d364; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--page); color: var(--ink); }
h1 { font-size: 1.5rem; line-height: 1.3; margin-bottom: .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.critical { color: var(--critical); } .warning { color: var(--warning); } .good { color: var(--good); }
.note { color: var(--note); }
.next { border-left: 4px solid currentColor; padding: .2rem .8rem; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { white-space: nowrap; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
td.number, th.number { text-align: right; white-space: nowrap; overflow-wrap: normal; }
td.word { overflow-wrap: break-word; } tr.accused td { font-weight: 700; }
details > table > tbody > tr > td:first-child { width: 50%; padding-right: 1.5rem; }
details > table.names > tbody > tr > td:first-child { white-space: nowrap; width: 1%; }
code, pre { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { overflow-x: auto; margin: .3rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
.quiet { opacity: .75; }
.wide { overflow-x: auto; }
.wide.end { direction: rtl; } .wide.end svg { direction: ltr; margin: 0 auto 0 0; }
svg { display: block; max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .name { font-weight: 700; font-size: 13px; } svg .site { font-family: ui-monospace, monospace; font-size: 11px; }
.node rect { fill: var(--panel); stroke: var(--line); stroke-width: 1; }
.node.accused rect { stroke: var(--critical); stroke-width: 2.5; } .node.accused .name { fill: var(--critical); }
.edge { fill: none; stroke: var(--ink); stroke-opacity: .55; stroke-width: 1.5; }
.head { fill: var(--ink); fill-opacity: .7; }
.k1 { fill: #4c8bd6; } .k2 { fill: #45a778; } .k3 { fill: #8f6fc9; } .k4 { fill: #c98a3c; } .k5 { fill: #3fa7b5; }
.k6 { fill: #b0699a; } .k7 { fill: #7d8b3f; } .k8 { fill: #5f6fb0; } .k9 { fill: #9c6b52; } .k10 { fill: #7a828c; }
.k-waits { fill: #d3c08a; } .k-ended { fill: #50565e; } .k-suspended { fill: var(--critical); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; margin: .4rem 0; }
.legend svg { display: inline; width: .8em; height: .8em; margin-right: .4em; }
table.calls th { font-weight: 600; } table.calls td { white-space: nowrap; }
table.calls td.call { white-space: normal; min-width: 18rem; }
.waiting { color: var(--warning); } .missing, .odd { color: var(--critical); font-weight: 700; } .gone { opacity: .5; }
table.grid { font-size: 13px; } table.grid td { white-space: nowrap; }
@media (max-width: 40rem) { body { margin: 1rem auto; padding: 0 .7rem; } h1 { font-size: 1.2rem; }
  .wide > table { font-size: 13px; } .wide > table td, .wide > table th { padding-right: .4rem; }
  .wide svg { max-width: none; } pre { white-space: pre-wrap; } table.calls td.call { min-width: 9rem; }
  table.calls td, table.calls th { padding-right: .4rem; font-size: 13px; }
  table.calls td code { display: block; min-width: 7rem; white-space: normal; }
  details > table > tbody > tr > td { display: block; width: auto; border: 0; } }
@media print { details > * { display: block; } body { max-width: none; margin: 0; } }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A page of these parts, without those that are empty."""
    return printable(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )
