"""What the server answers on each path, once the intake has let a call through."""
