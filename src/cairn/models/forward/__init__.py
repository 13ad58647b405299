"""The forward pass: decoder, encoder, experts, latents and recurrent layers over a kernel set."""
