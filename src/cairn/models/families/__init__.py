"""Model families: their config fields, layers and positions, and the names and shapes of their tensors."""
