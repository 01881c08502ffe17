"""What the machine says about a rank: its process in /proc, its stacks, the kernel log."""
