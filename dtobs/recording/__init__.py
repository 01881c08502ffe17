"""What a rank writes and what everybody else reads: page, rings, meta entries, run directory, RunView.

Writers are memory-mapped and never block; readers work on a live, a torn or a dead recording alike.
"""
