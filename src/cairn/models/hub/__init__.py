"""Models by name: finding, downloading, checking and removing them."""
