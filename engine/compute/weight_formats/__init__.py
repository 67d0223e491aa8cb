"""How a CPU holds the matrices of linear layers, and multiplies by them."""
