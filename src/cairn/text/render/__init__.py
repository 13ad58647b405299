"""Rendering of templates in a process of its own, with a time limit that tenants share."""
