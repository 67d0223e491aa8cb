"""Every metric, declared once: name, type, unit, labels, meaning."""
