"""Single kernels beside the limits that bound them."""
