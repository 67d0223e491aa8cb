"""Tool calls: the formats of the families, their grammars and parsers."""
