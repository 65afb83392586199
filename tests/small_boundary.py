"""A boundary experiment that trains for a second, on reviews of unlike lengths and a short text."""

import dataclasses
from pathlib import Path

from test_reviews import make_imdb

from ipslimit.experiments.boundary.setting import BoundarySetting, LanguageRuns, ReviewRuns
from ipslimit.experiments.text.corpus import CorpusSetting
from ipslimit.experiments.text.training import Schedule
from ipslimit.experiments.text.transformer import Architecture

TEXT = str(Path(__file__).parent / "text.txt")


def uneven_reviews(folder):
    """As `make_imdb`, but some reviews are longer, so that there is padding."""
    make_imdb(folder)
    for i, path in enumerate(sorted(folder.glob("*/*/*_*.txt"))):
        path.write_text(path.read_text(encoding="utf-8") + " so" * (7 * i % 31), encoding="utf-8")
    return folder


def small_setting(reviews, **changes):
    """Both tasks with four methods, of a few steps each; `reviews` is the folder of the reviews."""
    setting = BoundarySetting(
        methods=("adamw", "sbo", "sbo-fixed", "centred"),
        reviews=ReviewRuns(
            corpus=CorpusSetting(f"imdb:{reviews}", longest=40, batch=8),
            architecture=Architecture(width=8, layers=1, heads=2, dropout=0.1, word_dropout=0.1),
            steps=4,
            evaluate=2,
            lrs=(3e-3, 1e-2),
            tuning_seeds=2,
        ),
        language=LanguageRuns(
            language_data=TEXT,
            language_vocabulary=300,
            language_context=8,
            language_width=8,
            language_layers=1,
            language_heads=2,
            language_batch=2,
            language_warmup=2,
            language_steps=4,
            language_evaluate=2,
            held_out_windows=4,
            language_lrs=(3e-3, 1e-2),
        ),
        schedule=Schedule(warmup=2),
        extensions=1,
        seeds=3,
        widths=(8, 16),
        wide=24,
        early=2,
    )
    return dataclasses.replace(setting, **changes)
