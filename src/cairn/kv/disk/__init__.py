"""KV on disk: files of chunks, their index, budget, repair, pins and codecs."""
