"""Frozen image and text encoders in plain PyTorch.

``fedvl.models.checkpoint.load_model`` loads one.
"""

EMBEDDED = {
    "fedvl-tiny": "embedded dual encoder (CLIP architecture), 14.7 M parameters, 64 px: the default",
    "fedvl-tiny-vilt": "embedded fused encoder (ViLT architecture), 9.0 M parameters, 64 px",
}
