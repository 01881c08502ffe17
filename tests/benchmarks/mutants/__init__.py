"""Small training scripts, changed by a program: what of it dtobs finds, and whether it accuses what changes nothing."""
