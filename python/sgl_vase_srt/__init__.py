"""SGLang's side of sgl-vase: the only package here that imports ``sglang``."""
