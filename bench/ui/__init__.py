"""How long the app takes to draw its pages."""
