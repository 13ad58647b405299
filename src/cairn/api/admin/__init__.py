"""Routes for operators: models, cache, running requests, reload and health."""
