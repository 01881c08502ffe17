"""A read-only MCP server over a run directory, dumps or logs: `answers` makes bounded answers, `server` serves them."""
