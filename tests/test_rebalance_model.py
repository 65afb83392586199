"""The decoder of `ipslimit rebalance`, its training to the last bit, and the text it reads."""

import io

import numpy as np
import pytest
import torch
from builders import assert_to_rounding

from ipslimit.experiments.settings import StudyError
from ipslimit.experiments.store import DamagedFile
from ipslimit.experiments.text.source import check_source, read_text, windows
from ipslimit.experiments.text.tokens import load_tokens, token_key, tokenize
from ipslimit.experiments.text.training import Recipe, Trainer, held_out_loss
from ipslimit.experiments.text.transformer import VARIANTS, Shape, make_decoder, rotate, rotation
from ipslimit.experiments.text.wikipedia import plain_text, read_dump
from ipslimit.optim import SAGGS, find_pairs, verify_pairs

WINDOWS = np.random.default_rng(0).integers(0, 50, (20, 9))


def shape(variant, **sizes):
    return Shape(
        variant, **({"vocabulary": 50, "context": 8, "width": 16, "layers": 2, "heads": 4} | sizes)
    )


def trainer(variant="classic", seed=0, **recipe):
    return Trainer(shape(variant), Recipe(batch=3, **recipe), WINDOWS, seed, 9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_future_tokens_are_not_seen(variant):
    model = make_decoder(shape(variant), 0)
    tokens = torch.from_numpy(WINDOWS[:, :-1])
    later = tokens.clone()
    later[:, 5:] = 7
    assert torch.equal(model(tokens)[:, :5], model(later)[:, :5])
    assert not torch.equal(model(tokens)[:, 5:], model(later)[:, 5:])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("per", ["matrix", "head"])
def test_its_pairs_are_exact(variant, per):
    model = make_decoder(shape(variant), 0)
    pairs = find_pairs(model, per)
    key_heads = {"classic": 4, "modern": 2}[variant] if per == "head" else 1
    assert len(pairs) == 2 * (2 * key_heads + 1)
    assert verify_pairs(model, pairs, torch.from_numpy(WINDOWS[:, :-1]), scale=16.0) == 0.0


def test_the_variants_have_the_same_size():
    sizes = [
        sum(p.numel() for p in make_decoder(Shape(v, 1024, 64, 128, 4, 4), 0).parameters())
        for v in VARIANTS
    ]
    assert sizes == [932608, 918656]


def test_rotary_positions_see_distances_alone():
    cos, sin = rotation(10, 8, torch.zeros(1, dtype=torch.float64))
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    products = rotate(q.expand(10, 8), cos, sin) @ rotate(k.expand(10, 8), cos, sin).T
    for distance in (-3, 0, 4):
        along = products.diagonal(distance)
        assert_to_rounding(along, along[:1].expand_as(along), 64)
    assert abs(products[0, 0] - products[0, 1]) > 1e-3


def test_a_model_is_a_function_of_its_seed_and_leaves_random_state_alone():
    state = torch.get_rng_state()
    a, b, c = (make_decoder(shape("classic"), seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embedding.weight"], c["embedding.weight"])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("saggs", [False, True])
def test_training_resumes_to_the_last_bit(variant, saggs):
    def make():
        made = trainer(variant)
        if saggs:
            made.optimizer = SAGGS(made.optimizer, find_pairs(made.model), every=3)
        return made

    whole, first, second = make(), make(), make()
    losses = whole.run(9)
    kept = first.run(4)
    checkpoint = first.checkpoint()
    torch.load(io.BytesIO(checkpoint), weights_only=True)  # plain types alone
    second.restore(checkpoint)
    assert kept + second.run(5) == losses
    ends = whole.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_checkpoint_of_another_run_is_refused():
    with pytest.raises(ValueError, match="checkpoint must be of seed 0; got one of 1"):
        trainer().restore(trainer(seed=1).checkpoint())
    with pytest.raises(ValueError, match="checkpoint must be of shape"):
        trainer().restore(trainer("modern").checkpoint())


def test_every_window_is_used_once_an_epoch():
    made = trainer()
    batches = torch.cat([made.batch(step) for step in range(20)])  # 3 epochs of 20 windows
    for epoch in range(3):
        seen = batches[20 * epoch : 20 * (epoch + 1)].numpy()
        assert sorted(map(tuple, seen)) == sorted(map(tuple, WINDOWS))
    assert torch.equal(trainer().batch(13), batches[39:42])
    assert not torch.equal(trainer(seed=1).batch(0), batches[:3])


def test_training_stops_at_a_loss_that_is_no_number():
    made = trainer(lr=1e30)
    losses = made.run(10)
    assert len(losses) < 10 and not np.isfinite(losses[-1]) and np.isfinite(losses[:-1]).all()


def test_held_out_loss_is_a_mean_over_windows():
    model = make_decoder(shape("classic"), 0)
    assert held_out_loss(model, WINDOWS, 32) == pytest.approx(held_out_loss(model, WINDOWS, 7))


def test_markup_becomes_text():
    markup = (
        "{{Infobox|a={{b}}}}'''Anarchism''' is a [[political philosophy|philosophy]]<ref name=x>"
        "no</ref> of [[Greece]].<ref name=x/> <!-- no -->\n== History ==\n* [http://x.org A site]\n"
        "[[File:A.png|thumb|with a [[link]]]]{|\n| a table {{x}}\n|}\n[[Category:No]][[de:Nein]]"
        "2 &lt; 3, H<sub>2</sub>O"
    )
    text = plain_text(markup)
    assert text == "Anarchism is a philosophy of Greece. \nHistory\nA site\n2 < 3, H2O"


def test_a_dump_gives_its_articles(tmp_path):
    import bz2

    page = "<page><title>{}</title><ns>{}</ns>{}<revision><text>{}</text></revision></page>"
    pages = [
        page.format("One", 0, "", "first [[text]]"),
        page.format("Talk", 1, "", "no"),
        page.format("Moved", 0, '<redirect title="One"/>', "no"),
        page.format("Two", 0, "", ""),
    ]
    dump = f'<mediawiki xmlns="http://x/">{"".join(pages)}</mediawiki>'
    (tmp_path / "dump.bz2").write_bytes(bz2.compress(dump.encode()))
    assert list(read_dump(tmp_path / "dump.bz2")) == ["One\n\nfirst text", "Two\n\n"]


def test_a_file_is_split_by_lines(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"line {i}" for i in range(100)), encoding="utf-8")
    text = read_text(str(file))
    assert text.source == "text.txt"
    assert text.train.splitlines() + text.held_out.splitlines() == file.read_text().splitlines()
    assert 8 <= len(text.held_out.splitlines()) <= 12


@pytest.mark.parametrize("suffix", ["tokens", "raw"])
def test_wikitext_brings_its_own_split(tmp_path, suffix):
    for part in ("train", "valid", "test"):
        (tmp_path / f"wiki.{part}.{suffix}").write_text(f" = {part} = \n", encoding="utf-8")
    check_source(str(tmp_path))
    text = read_text(str(tmp_path))
    assert (text.train, text.held_out) == (" = train = \n", " = valid = \n")


def test_bad_data_is_named(tmp_path):
    with pytest.raises(ValueError, match="data must be 'wikipedia', a text file, or a folder"):
        check_source(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"folder with wiki\.train\.tokens and wiki\.valid"):
        check_source(str(tmp_path))
    (tmp_path / "latin").write_bytes("é\né".encode("latin-1"))
    with pytest.raises(StudyError, match="must be UTF-8 text; byte 0 is not"):
        read_text(str(tmp_path / "latin"))
    (tmp_path / "short").write_text("one line")
    with pytest.raises(StudyError, match="at least two lines"):
        read_text(str(tmp_path / "short"))


def test_tokens_are_kept_and_give_the_text_back(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    file = tmp_path / "text.txt"
    file.write_text("".join(f"the {i} naïve 漢字 words\n" for i in range(300)), encoding="utf-8")
    text = read_text(str(file))
    made = tokenize(text, 300, tmp_path)
    tokenizer = tokenizers.Tokenizer.from_str(made.tokenizer)
    assert tokenizer.decode(made.train) == text.train
    assert tokenizer.decode(made.held_out) == text.held_out
    key = token_key(text, 300)
    assert np.array_equal(load_tokens(tmp_path, key).train, made.train)
    [path] = tmp_path.glob("tokens-*.npz")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFile):
        load_tokens(tmp_path, key)
    assert np.array_equal(tokenize(text, 300, tmp_path).train, made.train)


def test_windows_follow_one_another():
    found = windows(np.arange(10), 3)
    assert found.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
