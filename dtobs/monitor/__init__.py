"""The node's monitor: one process a node that reads what the ranks record and outlives them.

It watches the ranks' processes, runs the detectors, keeps a journal of findings, captures evidence when the run stands
still, and serves ``/metrics`` and ``/api/view`` on the loopback interface. It imports no torch, never speaks to a rank
except through its worker server, and ends by itself when the ranks of its node are gone.
"""
