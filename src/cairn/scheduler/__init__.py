"""The scheduler: plans each step over waiting and running sequences, fairly between tenants."""
