"""Safetensors files: names, shapes and quantised forms of their tensors."""
