"""What notebooks, scripts and agents use: a run as an object, its answers as versioned documents, the MCP server."""
