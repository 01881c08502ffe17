"""Before a long run: is every host there, does it agree with the others, and do its links carry what they should?

Every rank measures (`rank`): its machine (`machine`, `environment`), who it reaches and what their clocks say
(`reach`), each link (`links`), and the values and speed of collectives (`collectives`). What it finds goes through
the rendezvous store (`meeting`); one process waits for it, never longer than it said (`reporter`), and judges it by
pure rules (`judge`, `blame`).
"""
