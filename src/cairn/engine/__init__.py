"""The narrow waist and what implements it."""
