"""Values that parts hand to each other: requests, outputs, models, steps, statistics and errors."""
