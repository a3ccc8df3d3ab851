"""Frozen image and text encoders in plain PyTorch; ``fedvl.models.checkpoint.load_model`` opens one."""

EMBEDDED = {
    "fedvl-tiny": "embedded dual encoder (CLIP's form), 14.7 M parameters, 64 px: the default",
    "fedvl-tiny-vilt": "embedded fused encoder (ViLT's form), 9.0 M parameters, 64 px",
}
