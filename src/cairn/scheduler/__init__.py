"""The scheduler: the next step over waiting and running sequences, fair to all tenants."""
