"""The token log of agents: records in segments on disk, their index, writing, recovery and compaction."""
