"""The live screen: `model` computes what is shown, `plain` prints it once, `app` keeps it on a terminal (Textual).

Everything but `app` and its widgets works without Textual.
"""
