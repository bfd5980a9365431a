"""Which code runs a layer's operations, and the operations as torch sees them."""
