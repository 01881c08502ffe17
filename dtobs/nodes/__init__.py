"""Several nodes: who answers, what is copied between them, and the token that lets them ask."""
