"""Interacting-particle transformers, their optimizer rules, and how fast they reach the limit."""

from .attention import attention_field, attention_vjp
from .heads import Heads
from .laws import Atoms, TruncatedNormal, XavierUniform
from .particles import ParticleRun, train_particles
from .problem import Problem
from .rules import SGD, AdamW, BlockAdamW, Rule

__all__ = [
    "SGD",
    "AdamW",
    "Atoms",
    "BlockAdamW",
    "Heads",
    "ParticleRun",
    "Problem",
    "Rule",
    "TruncatedNormal",
    "XavierUniform",
    "attention_field",
    "attention_vjp",
    "train_particles",
]
