"""The runtime's own loop beside those a user would otherwise write: same model, samples, optimizer, clipping, threads.

    pip install -c constraints.txt -e '.[bench]'     # Accelerate and Lightning Fabric; without them they are left out
    python -m tests.benchmarks.peers

All contenders live in the same processes, one thread each, and train in turns of a few steps, in a new random order
every round, so that whatever else the machine does hits all of them. A ratio is the runtime's time over a peer's,
summed over the ranks; its 5–95 % interval is a bootstrap over the rounds. `test_peers.py` checks that they all end with
the same weights, so that it is the same work that is timed.
"""
