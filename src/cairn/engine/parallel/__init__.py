"""One model over several ranks: each holds a part of every layer's heads and MLP, and of the KV."""
