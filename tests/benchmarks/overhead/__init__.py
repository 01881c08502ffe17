"""What observing costs: the ratio of process CPU time per step with and without dtobs, in one process.

    python -m tests.benchmarks.overhead --json

Blocks of steps with and without dtobs alternate in random order, so that whatever else the machine does hits both.
Step numbers run on over all blocks, so what is sampled every K steps is counted as in a long run. Attaching and
closing are not counted. The spread is a bootstrap over pairs of blocks.
"""
