"""Trains the bundled tiny pair: a Qwen3 target and its DFlash drafter, in plain PyTorch."""
