"""The small operations of a layer, between its matrix products: one interface, three backends."""
