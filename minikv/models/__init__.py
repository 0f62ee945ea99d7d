"""Models: shapes, decoders, tokenizers, and where their weights come from.

Start with :func:`load`.
"""

from minikv.models.config import ModelConfig
from minikv.models.decoder import Decoder
from minikv.models.files.load import Model, load
from minikv.models.files.shapes import random_model
from minikv.models.files.tokenizer import Tokenizer

__all__ = ["Decoder", "Model", "ModelConfig", "Tokenizer", "load", "random_model"]
