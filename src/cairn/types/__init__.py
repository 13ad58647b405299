"""Values that cross the package's seams: requests, outputs, models, steps, statistics and errors."""
