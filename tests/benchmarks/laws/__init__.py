"""Laws of distributed training beside what the runtime really does: memory, recomputation, bubbles, bytes, scaling.

python -m tests.benchmarks.laws                 # all, as Markdown tables
python -m tests.benchmarks.laws memory traffic  # some; seconds each
"""
