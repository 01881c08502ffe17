"""Public fakes: a run without ranks (`fake_run`) and Flight Recorder dumps without a job (`synthetic_dumps`).

For people who write a detector or a source of their own, and for the tests here.
"""
