"""`cairn team`: the command, and the view of a running team."""
