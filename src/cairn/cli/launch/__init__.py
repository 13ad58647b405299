"""`cairn launch`: agents on this machine, and how each is started."""
