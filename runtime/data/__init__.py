"""From text to batches: `corpus` reads documents, `tokenizer` turns them into numbers, `tokens` keeps the numbers on
disk, `loader` deals them out to ranks."""
