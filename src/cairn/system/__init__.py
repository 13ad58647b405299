"""The outside world behind interfaces: clock, files, network; also deadlines, metrics and spans."""
