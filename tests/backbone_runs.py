"""Settings of `ipslimit backbone` that take seconds."""

from test_reviews import make_imdb

from ipslimit.experiments.backbone.setting import ParticleSetting, TextSetting
from ipslimit.experiments.text.corpus import CorpusSetting
from ipslimit.experiments.text.transformer import Architecture

PARTICLES = ParticleSetting(
    depths=(2, 8),
    particle_heads=(4,),
    particle_steps=8,
    particle_seeds=2,
    depth_nodes=16,
    max_elements=32,
)


def small_text(folder):
    """Twelve steps of a model of two blocks on the reviews that are made in a folder."""
    return TextSetting(
        corpus=CorpusSetting(f"imdb:{make_imdb(folder)}", longest=12, batch=8),
        architecture=Architecture(width=8, layers=2, heads=2),
        steps=12,
        every=2,
        window=3,
        late=0.5,
        seeds=2,
    )
