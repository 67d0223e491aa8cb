"""The settings of single techniques, each with its checks in a file of its own. `EngineConfig` inherits them."""
