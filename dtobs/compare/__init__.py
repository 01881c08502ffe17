"""Two runs held against each other: where they part, and why. No torch; both are read from their recordings."""
