"""What the model services share: an engine in a process of its own behind a gRPC process.

The gRPC process never loads torch: it reads tokenizer and configuration from the model's folder and
exchanges :mod:`specrag_inference.messages` with the engine process, so that health answers during
the longest forward pass.
"""
