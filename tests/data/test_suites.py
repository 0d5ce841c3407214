"""The generated tests of recall, copying and state tracking against evaluators of their
own, which read one sequence at a time, and against what their definitions say."""

import itertools
from typing import Any

import numpy as np
import pytest

from lra_jax.data import memory, pipeline
from lra_jax.data.suites import mad, mqar, needle, state

MQAR = {
    "train": "64/4:300,32/8:100",
    "test": "64/4:200,64/16:100",
    "num_valid": 20,
    "vocab_size": 128,
    "power": 0.01,
    "noise": True,
}
SIZES = {"num_train": 300, "num_valid": 40, "num_test": 200}
MAD: dict[str, dict[str, Any]] = {
    "mad-compress": {"vocab_size": 16, "length": 32},
    "mad-fuzzy-recall": {"vocab_size": 16, "length": 128, "motif": 3},
    "mad-recall": {"vocab_size": 16, "length": 128},
    "mad-memorise": {"vocab_size": 64, "length": 32},
    "mad-noisy-recall": {
        **{"vocab_size": 32, "length": 128},
        **{"noise_vocab": 16, "noise": 0.2},
    },
    "mad-selective-copy": {"vocab_size": 16, "length": 256, "copied": 16},
}
LENGTHS = {
    **{"min_length": 3, "max_length": 40, "test_min": 40, "test_max": 90},
    "parts": "20,64",
}
STATE = {
    "parity": (3, 2),
    "modular": (10, 5),
    "modular-brackets": (12, 5),
    "s5": (120, 120),
    "a5": (60, 60),
}
NEEDLE = {
    **{"num_train": 300, "num_valid": 20, "num_test": 60, "vocab_size": 8},
    **{"min_length": 16, "max_length": 40, "parts": "64,1000"},
}


def draw(task: str, seed: int = 0, **changes: Any) -> memory.MemoryDataset:
    if task == "mqar":
        return mqar.prepare(seed=seed, **(MQAR | changes))
    if task == "needle":
        return needle.prepare(seed=seed, **(NEEDLE | changes))
    if task in MAD:
        settings = SIZES | MAD[task] | changes
        return mad.prepare(task=task, seed=seed, **settings)
    vocab_size, num_classes = STATE[task]
    sizes = {"vocab_size": vocab_size, "num_classes": num_classes}
    settings = SIZES | LENGTHS | sizes | changes
    return state.prepare(task=task, seed=seed, **settings)


def rows(dataset: memory.MemoryDataset, split: str):
    """Each sequence, and its answers by position."""
    source = dataset.source(split)
    positions, labels = dataset.positions(split), dataset.labels(split)
    for index in range(len(source)):
        tokens = source[index]["tokens"].tolist()
        pairs = zip(positions[index].tolist(), labels[index].tolist(), strict=True)
        answers = {place: label for place, label in pairs if label >= 0}
        assert answers and max(answers) < len(tokens)
        yield tokens, answers


ALL = ["mqar", *MAD, *STATE, "needle"]


@pytest.mark.parametrize("task", ALL)
def test_a_seed_fixes_every_example(task):
    first = draw(task)
    assert draw(task).fingerprint == first.fingerprint
    other = draw(task, seed=1)
    assert other.fingerprint != first.fingerprint
    test = list(rows(first, "test"))
    assert test != list(rows(other, "test"))
    assert test[:20] != list(rows(first, "valid"))[:20]
    # One split can grow without changing another.
    more = {"train": "64/4:7"} if task == "mqar" else {"num_train": 7}
    grown = draw(task, **more)
    assert grown.num_examples("train") == 7
    assert list(rows(grown, "test")) == test
    for split in ("train", *first.splits, *first.parts):
        ids = np.concatenate([x for x, _ in rows(first, split)])
        labels = first.labels(split)
        assert ids.min() >= 0 and ids.max() < first.vocab_size
        assert labels.min() >= -1 and labels.max() < first.num_classes


@pytest.mark.parametrize("noise", [True, False])
def test_mqar(noise):
    data = draw("mqar", noise=noise)
    for split, pairs_of in (("train", {64: {4}, 32: {8}}), ("test", {64: {4, 16}})):
        for tokens, answers in rows(data, split):
            pairs = len(answers)
            assert pairs in pairs_of[len(tokens)]
            front = iter(tokens[: 2 * pairs])
            book = dict(zip(front, front, strict=True))
            assert len(book) == len(set(book.values())) == pairs
            assert all(0 < key < 64 for key in book)
            assert all(64 <= value < 128 for value in book.values())
            assert all(p >= 2 * pairs and p % 2 == 0 for p in answers)
            assert {tokens[p]: label for p, label in answers.items()} == book
            if not noise:
                rest = set(range(2 * pairs, len(tokens))) - set(answers)
                assert all(tokens[p] == 0 for p in rest)
    assert data.parts == ("64/4", "64/16")
    assert [len(answers) for _, answers in rows(data, "64/16")] == [16] * 100


def test_the_places_of_queries_follow_the_power_law():
    """The first key's place is drawn first, with i^(power - 1) as its chance."""
    count, length, pairs, power = 20_000, 24, 2, 0.3
    rng = np.random.default_rng(0)
    drawn = mqar.examples(
        *(rng, length, pairs, count), vocab_size=64, power=power, noise=False
    )
    asked = drawn.tokens[:, 2 * pairs :: 2] == drawn.tokens[:, :1]
    expected = np.arange(1, 11) ** (power - 1.0)
    expected /= expected.sum()
    error = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(asked.mean(0) - expected) < 4.5 * error).all()


@pytest.mark.parametrize("choices", [40, 4095])
def test_rows_without_repetition(choices):
    drawn = mqar._distinct(np.random.default_rng(0), 400, choices, 20)
    assert all(len(set(row)) == 20 for row in drawn.tolist())
    assert drawn.min() >= 0 and drawn.max() < choices
    assert abs(drawn.mean() / (choices - 1) - 0.5) < 0.02


@pytest.mark.parametrize("task", ["mad-recall", "mad-noisy-recall"])
def test_recall(task):
    data, is_noise = draw(task), []
    for split in ("train", "test"):
        for tokens, answers in rows(data, split):
            assert len(tokens) == 127
            book: dict[int, int] = {}
            expected = {}
            for place in range(0, 127, 2):
                key = tokens[place]
                is_noise.append(key >= 16)
                if key >= 16:
                    continue
                value = tokens[place + 1] if place < 126 else answers[126]
                assert key < 8 <= value < 16
                assert book.get(key, value) == value
                if key in book:
                    expected[place] = value
                book[key] = value
            assert 126 in expected
            if split == "train":
                expected = dict(enumerate([*tokens[1:], answers[126]]))
            assert answers == expected
    share = 0.2 if task == "mad-noisy-recall" else 0
    # All but the last pair of 64, and one that is real, may be noise.
    assert np.mean(is_noise) == pytest.approx(share * 62 / 64, abs=0.01)


# With 128 tokens there are a quarter of a million keys.
@pytest.mark.parametrize("vocab_size", [16, 128])
def test_fuzzy_recall(vocab_size):
    data, sizes = draw("mad-fuzzy-recall", vocab_size=vocab_size), []
    last_token = vocab_size - 1
    half = last_token // 2
    for tokens, answers in rows(data, "test"):
        full = [*tokens, answers[127]]
        start = next(i for i, token in enumerate(full) if token != last_token)
        assert set(full[:start]) <= {last_token}
        book, expected, place, last = {}, {}, start, False
        while place < 129:
            key = tuple(full[place : place + 3])
            assert len(set(key)) == 3 and max(key) < half
            after = full[place + 3 :]
            run = itertools.takewhile(lambda x: half <= x < last_token, after)
            value = tuple(run)
            assert 1 <= len(set(value)) == len(value) <= 3
            assert book.get(key, value) == value
            sizes.append(len(value))
            if key in book:
                expected |= {place + 2 + i: token for i, token in enumerate(value)}
            last, book[key] = key in book, value
            place += 3 + len(value)
        assert last  # The last key was there before.
        assert answers == expected
    assert np.bincount(sizes)[1:] / len(sizes) == pytest.approx([1 / 3] * 3, abs=0.03)
    for tokens, answers in rows(data, "train"):
        assert answers == dict(enumerate([*tokens[1:], answers[127]]))


def test_memorise():
    data, book = draw("mad-memorise"), {}
    for split in ("train", "test"):
        for tokens, answers in rows(data, split):
            assert tokens[1::2] == [63] * 16
            for place, value in answers.items():
                key = tokens[place - 1]
                assert book.setdefault(key, value) == value
                assert key < 31 <= value < 63
            assert list(answers) == list(range(1, 32, 2))
    assert len(set(book.values())) == len(book) == 31
    assert mad.make_book(64)[5] == book[5]


def test_compress():
    for tokens, answers in rows(draw("mad-compress"), "test"):
        assert tokens[-1] == 15 and max(tokens[:-1]) < 15
        assert answers == dict(enumerate(tokens))


def test_selective_copy():
    for tokens, answers in rows(draw("mad-selective-copy"), "test"):
        assert tokens[239] == 15 and tokens[240:] == [14] * 16
        letters = [token for token in tokens[:239] if token != 14]
        assert len(letters) == 16 and max(letters) < 14
        assert tokens[238] == letters[-1]
        assert answers == dict(zip(range(240, 256), letters, strict=True))


def test_parity():
    for tokens, answers in rows(draw("parity"), "test"):
        ones = sum(token == 2 for token in tokens)
        assert set(tokens) <= {1, 2} and answers == {len(tokens) - 1: ones % 2}


def test_modular_arithmetic():
    words = dict(enumerate("_+-*=01234"))
    for split in ("train", "test"):
        for tokens, answers in rows(draw("modular"), split):
            text = "".join(words[token] for token in tokens)
            assert text[-1] == "=" and text[:-1].count("=") == 0
            assert answers == {len(tokens) - 1: eval(text[:-1]) % 5}
            assert set(text[1:-1:2]) <= set("+-*") and set(text[0::2]) <= set("01234")


def test_modular_arithmetic_with_brackets():
    words = dict(enumerate("01234+-*()="))
    for split in ("train", "test"):
        for tokens, answers in rows(draw("modular-brackets"), split):
            text = "".join(words[token] for token in tokens)
            assert text[-1] == "=" and text[:-1].count("=") == 0
            assert answers == {len(tokens) - 1: eval(text[:-1]) % 5}


@pytest.mark.parametrize("group", ["s5", "a5"])
def test_groups(group):
    elements = state.elements(group).tolist()
    for tokens, answers in rows(draw(group), "test"):
        things = list(range(5))
        for place, token in enumerate(tokens):
            things = [elements[token][x] for x in things]
            assert elements[answers[place]] == things
        assert len(answers) == len(tokens)
    table = state.products(group)
    numbers = np.arange(120 if group == "s5" else 60)
    assert (table[0] == numbers).all() and (table[:, 0] == numbers).all()
    assert (np.sort(table, 0) == numbers[:, None]).all()
    a, b, c = np.random.default_rng(0).integers(len(table), size=(3, 500))
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()
    assert (table != table.T).any()
    if group == "a5":
        assert all(np.linalg.det(np.eye(5)[row]) > 0 for row in elements)


def test_needle():
    for split in ("train", "1000"):
        places = []
        for tokens, answers in rows(draw("needle"), split):
            assert tokens[-1] == 7 and tokens.count(7) == tokens.count(6) == 1
            place = tokens.index(6)
            assert answers == {len(tokens) - 1: tokens[place + 1]}
            places.append(place / (len(tokens) - 3))
        assert np.mean(places) == pytest.approx(0.5, abs=0.12)


@pytest.mark.parametrize("task", ["parity", "modular", "modular-brackets", "s5"])
def test_lengths_are_uniform(task):
    # The tokens that a length counts beside the tokens that are read.
    beside = {"parity": 1, "modular": 1, "modular-brackets": 2, "s5": 0}[task]
    data = draw(task, num_train=20_000)
    lengths = data.lengths("train") + beside
    if task == "modular":
        assert set(lengths) == set(range(3, 40, 2))
        assert lengths.mean() == pytest.approx(21, abs=0.4)
    elif task == "modular-brackets":
        assert set(lengths) == set(range(5, 41))
        assert (lengths == 5).mean() == pytest.approx(3 / 38, abs=0.01)
    else:
        assert set(lengths) == set(range(3, 41))
        assert lengths.mean() == pytest.approx(21.5, abs=0.4)
    assert set(data.lengths("64") + beside) == {63 if task == "modular" else 64}
    test = data.lengths("test") + beside
    assert (39 if task == "modular" else 40) <= test.min() and test.max() <= 90


@pytest.mark.parametrize("task", STATE)
def test_answers_are_balanced(task):
    data = draw(task, num_test=6_000)
    labels = data.labels("test")
    counts = np.bincount(labels[labels >= 0], minlength=data.num_classes)
    share = counts / counts.sum()
    # Products of digits are 0 more often than not.
    most = 0.45 if task == "modular" else 1.25 / data.num_classes
    assert share.max() < most and share.min() > 0.6 / data.num_classes


def test_batches_hold_the_answers_of_their_rows():
    data = draw("mqar", vocab_size=1_000)
    assert data.token_dtype == np.uint16
    book = {tuple(tokens): answers for tokens, answers in rows(data, "train")}
    batches = pipeline.train_iterator(
        data, batch_size=8, seed=0, num_steps=60, buckets="32,64"
    )
    seen = 0
    for batch in itertools.islice(batches, 60):
        assert batch["labels"].dtype == batch["positions"].dtype == np.int32
        parts = (batch[n] for n in ("tokens", "lengths", "positions", "labels"))
        for tokens, length, positions, labels in zip(*parts, strict=True):
            answers = book[tuple(tokens[:length].tolist())]
            actual = {p: x for p, x in zip(positions, labels, strict=True) if x >= 0}
            assert actual == answers
            seen += 1
    assert seen == 480


def test_parts_have_widths_of_their_own():
    data = draw("needle")
    buckets = pipeline.bucket_lengths(data, "auto")
    assert buckets[-1] == 64  # Not the thousand of the longest part.
    for part, width in (("64", 64), ("1000", 1000)):
        batches = list(pipeline.EvalBatches(data, part, buckets, 32))
        assert {batch["tokens"].shape for batch in batches} == {(32, width)}
        assert sum(batch["weights"].sum() for batch in batches) == 60
    shapes = {
        (batch["tokens"].shape, batch["labels"].shape)
        for split in (*data.splits, *data.parts)
        for batch in pipeline.EvalBatches(data, split, buckets, 32)
    }
    assert len(shapes) <= pipeline.eval_shapes(data, buckets) == 2


@pytest.mark.parametrize(
    ("task", "changes", "name"),
    [
        ("mqar", {"vocab_size": 20}, "vocab_size"),
        ("mqar", {"train": "64/17:5"}, "train"),
        ("mqar", {"test": "63/4:5"}, "test"),
        ("mqar", {"test": "64/4:1,64/4:2"}, "test"),
        ("mad-recall", {"vocab_size": 3}, "vocab_size"),
        ("mad-recall", {"length": 7}, "length"),
        ("mad-noisy-recall", {"noise_vocab": 30}, "vocab_size"),
        ("mad-fuzzy-recall", {"length": 12}, "length"),
        # With a single answer, chance is 100 %.
        ("mad-compress", {"vocab_size": 2}, "vocab_size"),
        ("mad-memorise", {"vocab_size": 4}, "vocab_size"),
        ("mad-selective-copy", {"vocab_size": 3}, "vocab_size"),
        ("mad-selective-copy", {"length": 33}, "length"),
        ("parity", {"min_length": 2}, "min_length"),
        ("parity", {"test_max": 30}, "test_max"),
        ("s5", {"parts": "20,x"}, "parts"),
        ("needle", {"parts": "2"}, "parts"),
    ],
)
def test_settings_that_cannot_work(task, changes, name):
    with pytest.raises(ValueError, match=f"^--data.{name}: expected .*, got "):
        draw(task, **changes)
