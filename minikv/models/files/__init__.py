"""Model files: safetensors folders, GGUF, tokenizers, the download, and published shapes."""
