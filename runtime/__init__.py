"""A complete distributed training runtime that a person can read in an evening.

Start with `train.py` (the command), then `loop.py` (the step). Nothing here imports dtobs except `train.py`.
"""
